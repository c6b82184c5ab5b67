#!/usr/bin/env bash
# Run the commands of README.md's quick start in a fresh clone of what is committed, as a reader would.
#
# The commands are the fenced block after `<!-- quickstart -->`. SPEAR_DEMO_STEPS (default 2) shortens the training of
# the demo; the tests are only collected, since whoever calls this has run them already (unset with FULL=1).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

commands=$(awk '/<!-- quickstart -->/ {found = 1} found && /^```/ {if (inside) exit; inside = 1; next} inside' README.md)
[ -n "$commands" ] || { echo "quickstart: README.md has no fenced block after <!-- quickstart -->" >&2; exit 1; }
[ -z "$(git status --porcelain)" ] || echo "quickstart: changes that are not committed are not part of this check"

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
git clone -q . "$folder/clone"
cd "$folder/clone"
if [ -z "${FULL:-}" ]; then
    export SPEAR_DEMO_STEPS=${SPEAR_DEMO_STEPS:-2} PYTEST_ADDOPTS="--collect-only -q"
fi
echo "quickstart: in a fresh clone, with SPEAR_DEMO_STEPS=${SPEAR_DEMO_STEPS:-unset}:"
echo "$commands" | sed 's/^/    /'
bash -euo pipefail -c "$commands" </dev/null
echo "quickstart: all commands ran"
