#!/usr/bin/env bash
# Make .venv-peers, and with the argument "all" .venv-peers-rollouts and .venv-peers-nemo as well: libraries that our adapters
# are for and whose pins exclude ours, or one another's, to prove the adapters with the real other side. All of them take about
# 3 GB; running it again is free when nothing has changed.
#
#   PYTHON       interpreter to use (default: the one that .venv was made with, else python3)
#   PYTHON312    interpreter of .venv-peers-nemo (default python3.12); without one it is left out
#   PEERS        folder of the first (default .venv-peers)
#   TORCH_INDEX  index that has PyTorch's CPU wheels, e.g. https://download.pytorch.org/whl/cpu
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

peers=${PEERS:-.venv-peers}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PYTHONWARNINGS=ignore
python=${PYTHON:-$("${VENV:-.venv}/bin/python" -c 'import sys; print(sys._base_executable)' 2>/dev/null || echo python3)}

# install FOLDER ARGUMENT...: with the uv of `make setup`, in a fifth of the time, or with pip.
uv=${VENV:-.venv}/bin/uv
if [ -x "$uv" ]; then source scripts/uv.sh; use_pip_settings "${uv%/*}/python"; fi
install() {
    local folder=$1
    shift
    if [ -x "$uv" ]; then "$uv" pip install -q --python "$folder/bin/python" "$@" && return; fi
    "$folder/bin/python" -m pip install -q "$@"
}

# make FOLDER INTERPRETER CONSTRAINTS PACKAGE...: ours too, since the adapters run in the other library's process.
make() {
    local folder=$1 interpreter=$2 constraints=constraints/$3 stamp=$1/.spear-peers wanted
    shift 3
    wanted=$(cat "$constraints" scripts/setup_peers.sh VERSION pyproject.toml sandbox/pyproject.toml | cksum)
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then return; fi
    if [ ! -e "$folder/pyvenv.cfg" ] && [ -n "$(ls -A "$folder" 2>/dev/null)" ]; then
        echo "setup_peers: '$folder' has other files, which a set-up would delete: name another folder" >&2
        exit 1
    fi
    "$interpreter" -m venv --clear "$folder"
    if grep -q '^torch==' "$constraints"; then
        install "$folder" -c "$constraints" ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
    fi
    install "$folder" -c "$constraints" "$@" -e ./sandbox -e .
    printf '%s\n' "$wanted" >"$stamp"
}

make "$peers" "$python" peers.txt openenv gem-llm
if [ "${1:-}" != all ]; then exit; fi
make "$peers-rollouts" "$python" peers-rollouts.txt verifiers tinker-cookbook skyrl-gym
python312=$(command -v "${PYTHON312:-python3.12}" || true)
if "${python312:-false}" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
    make "$peers-nemo" "$python312" peers-nemo.txt nemo-gym
else
    echo "setup_peers: no Python 3.12, so NeMo Gym is left out (name one: PYTHON312=/path/to/python3.12)" >&2
fi
