#!/usr/bin/env bash
# Make .venv-peers: libraries that our adapters are for and whose pins exclude ours, to prove the adapters with the real
# other side. About 500 MB; running it again is free when nothing has changed.
#
#   PYTHON  interpreter to use (default: the one that .venv was made with, else python3)
#   PEERS   folder of the environment (default .venv-peers)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

peers=${PEERS:-.venv-peers}
constraints=constraints/peers.txt
stamp=$peers/.spear-peers
wanted=$(cat "$constraints" scripts/setup_peers.sh VERSION pyproject.toml sandbox/pyproject.toml | cksum)
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then exit 0; fi

python=${PYTHON:-$("${VENV:-.venv}/bin/python" -c 'import sys; print(sys._base_executable)' 2>/dev/null || echo python3)}
"$python" -m venv --clear "$peers"
pip() { "$peers/bin/python" -m pip "$@"; }
# Ours too, to run in one process with GEM.
PYTHONWARNINGS=ignore pip install -q -c "$constraints" openenv gem-llm -e ./sandbox -e .
printf '%s\n' "$wanted" >"$stamp"
