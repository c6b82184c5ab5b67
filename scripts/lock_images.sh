#!/usr/bin/env bash
# Write what images install with digests: constraints/sandbox.txt, build.txt and sbom.txt, of the versions in cpu.txt.
# Each package has the digests of all its files for Python 3.11, so other platforms may install it too. Needs the index.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" && "$work/venv/bin/pip" install -q --disable-pip-version-check uv

lock() {  # NAME [ARGUMENTS...], requirements on stdin
    local name=$1
    shift
    cat >"$work/$name.in"
    {
        echo "# scripts/lock_images.sh writes this file; pip takes it with --require-hashes."
        "$work/venv/bin/uv" pip compile --quiet --generate-hashes --python-version 3.11 --no-header --no-annotate \
            --constraint constraints/cpu.txt "$work/$name.in" "$@"
    } >"$work/$name.txt"
    mv "$work/$name.txt" "constraints/$name.txt"
}

printf '%s\n' numpy scipy sympy | lock sandbox sandbox/pyproject.toml --extra server
printf '%s\n' pip setuptools | lock build
printf '%s\n' cyclonedx-bom | lock sbom
