#!/usr/bin/env bash
# Run the fast tests of sandbox, environments and agents in an environment without verl, torch and Ray: on Python 3.13
# too, for which verl has no release. Arguments go to pytest.
#
#   PYTHON  interpreter to use (default python3.13)
#   LIGHT   folder of the environment (default .venv-light)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3.13}
light=${LIGHT:-.venv-light}
"$python" --version >/dev/null 2>&1 || {
    echo "test_light: '$python' does not run: name a Python of 3.10 to 3.13 with PYTHON" >&2
    exit 1
}
stamp=$light/.spear-light
wanted="$("$python" --version)
$(cat VERSION pyproject.toml ./*/pyproject.toml setup.py spear_envs/bm25/*.[ch] constraints/cpu.txt scripts/test_light.sh |
    cksum)"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_USER=0
unset PYTHONPATH PYTHONHOME PIP_TARGET PIP_PREFIX
if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
    if [ ! -e "$light/pyvenv.cfg" ] && [ -n "$(ls -A "$light" 2>/dev/null)" ]; then
        echo "test_light: '$light' has other files, which a set-up would delete: name another folder" >&2
        exit 1
    fi
    "$python" -m venv --clear "$light"
    PYTHONWARNINGS=ignore "$light/bin/python" -m pip install -q -c constraints/cpu.txt \
        pytest pytest-timeout pytest-xdist hypothesis PyYAML -e './sandbox[server]' -e '.[data,sandbox,env-server,retriever]' -e './agents[api]'
    # The peer of Sokoban's golden games; its other dependencies are not needed.
    "$light/bin/python" -m pip install -q --no-deps -c constraints/cpu.txt gym-sokoban imageio
    printf '%s\n' "$wanted" >"$stamp"
fi
exec "$light/bin/python" -m pytest -q -n 2 --dist loadfile tests/sandbox tests/spear_envs tests/agents "$@"
