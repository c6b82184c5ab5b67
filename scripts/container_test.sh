#!/usr/bin/env bash
# Build the images `sandbox` and `envs` and run them as their pages say, with no Docker engine: buildah, podman and runc,
# as root; then the services of compose.yaml with podman-compose.
#
# Installs these tools by apt and pip if they are missing, makes a small Debian system in build/container-base with
# debootstrap (kept for the next time) in the place of the public Python image, and runs the tests that need containers.
# LARGE=1 also builds `train-cpu` and trains in it (some 10 GB of disk while it lasts). Further arguments go to pytest.
#
#   SPEAR_CONTAINER_STORE  folder in which images are kept for the next time (default: a temporary one)
#   TORCH_INDEX            index that has PyTorch's CPU wheels, if pip's own has not
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export SPEAR_CONTAINER_ROOTFS=${SPEAR_CONTAINER_ROOTFS:-$PWD/build/container-base}
[ "$(id -u)" = 0 ] || { echo "container_test: run this as root: it makes a Debian system and starts containers" >&2; exit 1; }

# The network of containers and their first process are recommendations of Debian's podman.
tools=(buildah podman runc debootstrap) missing=()
for tool in "${tools[@]}"; do command -v "$tool" >/dev/null || missing+=("$tool"); done
[ -e /usr/lib/podman/aardvark-dns ] || missing+=(netavark aardvark-dns)
[ -e /usr/libexec/podman/catatonit ] || missing+=(catatonit)
if [ ${#missing[@]} -gt 0 ]; then
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"
fi
# Debian's podman-compose is too old for this file.
export PODMAN_COMPOSE=${PODMAN_COMPOSE:-$PWD/build/podman-compose/bin/podman-compose}
if [ ! -x "$PODMAN_COMPOSE" ]; then
    "${VENV:-.venv}/bin/python" -m venv --clear build/podman-compose
    build/podman-compose/bin/python -m pip install -q --disable-pip-version-check \
        podman-compose==1.6.0 python-dotenv==1.2.4 PyYAML==6.0.3
fi
if [ ! -e "$SPEAR_CONTAINER_ROOTFS/usr/bin/python3" ]; then
    rm -rf "$SPEAR_CONTAINER_ROOTFS.new"
    mkdir -p "$SPEAR_CONTAINER_ROOTFS.new"
    debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$SPEAR_CONTAINER_ROOTFS.new"
    # A proxy of this machine may have certificates of its own; pip in the image goes the same way out.
    cp /etc/ssl/certs/ca-certificates.crt "$SPEAR_CONTAINER_ROOTFS.new/etc/ssl/certs/"
    rm -rf "$SPEAR_CONTAINER_ROOTFS.new/var/cache/apt" "$SPEAR_CONTAINER_ROOTFS.new/var/lib/apt/lists"
    mv "$SPEAR_CONTAINER_ROOTFS.new" "$SPEAR_CONTAINER_ROOTFS"
fi
select="container and not large"
if [ -n "${LARGE:-}" ]; then select=container; fi
exec "${VENV:-.venv}/bin/python" -m pytest -q -rs -m "$select" tests/containers "$@"
