#!/usr/bin/env bash
# Pack what `spear prove-gpu` needs on a machine that has a GPU, Python and torch for CUDA, and no network: wheels of
# everything else, cut into parts of 60 MiB for machines that take little at a time.
#
#   scripts/gpu_kit.sh KIT [PYTHON]         here, with the Python version of that machine (python3.12)
#   KIT/install.sh FOLDER                   there, once all parts lie in KIT: a virtual environment in FOLDER
#   FOLDER/bin/spear prove-gpu
set -euo pipefail

KIT=${1:?name the folder of the kit}
PYTHON=${2:-python3.12}
ROOT=$(cd "$(dirname "$0")/.." && pwd)
PART=${PART:-60m}
# Of the machine: torch, what comes with it, and what only vLLM asks for.
THEIRS='^(torch|triton|nvidia-.*|cuda-.*|setuptools|pip)$'

mkdir -p "$KIT"
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
"$PYTHON" -m venv "$WORK/venv"
PIP=("$WORK/venv/bin/python" -m pip --disable-pip-version-check)
SOURCES=("$ROOT/sandbox" "$ROOT" "$ROOT/agents" "$ROOT/training")

"${PIP[@]}" install --quiet --dry-run --ignore-installed --report "$WORK/report.json" \
    -c "$ROOT/constraints/gpu.txt" "${SOURCES[@]}"
"$WORK/venv/bin/python" - "$WORK/report.json" "$THEIRS" >"$WORK/list.txt" <<'PROGRAM'
import json, re, sys

for item in json.load(open(sys.argv[1]))["install"]:
    name, version = item["metadata"]["name"].lower().replace("_", "-"), item["metadata"]["version"]
    if not name.startswith("spear-") and not re.match(sys.argv[2], name):
        print(f"{name}=={version}")
PROGRAM
"${PIP[@]}" wheel --quiet --no-deps --wheel-dir "$WORK/wheels" -r "$WORK/list.txt"
"${PIP[@]}" wheel --quiet --no-deps --wheel-dir "$WORK/wheels" "${SOURCES[@]}"

rm -f "$KIT"/part-*
tar -C "$WORK" -c wheels | split -b "$PART" -d - "$KIT/part-"
(cd "$KIT" && sha256sum part-* >parts.sha256)
cat >"$KIT/install.sh" <<'PROGRAM'
#!/usr/bin/env bash
# Install the kit beside the torch of this machine: install.sh FOLDER [PYTHON]
set -euo pipefail
FOLDER=${1:?name the folder of the environment}
cd "$(dirname "$0")"
sha256sum --check --quiet parts.sha256
"${2:-python3}" -m venv --system-site-packages "$FOLDER"
WHEELS=$(mktemp -d)
trap 'rm -rf "$WHEELS"' EXIT
cat part-* | tar -C "$WHEELS" -x
"$FOLDER/bin/python" -m pip install --quiet --no-index --no-deps --ignore-installed "$WHEELS"/wheels/*.whl
"$FOLDER/bin/python" -c 'import spear_training, torch; print("torch", torch.__version__, torch.cuda.is_available())'
PROGRAM
chmod +x "$KIT/install.sh"
du -sh "$KIT"
