#!/usr/bin/env bash
# Build the sandbox's image and run it as its page says, with no Docker engine: buildah, podman and runc, as root.
#
# Installs these tools by apt if they are missing, makes a small Debian system in build/container-base with debootstrap
# (kept for the next time) in the place of the public Python image, and runs the tests that need containers: about 4
# minutes the first time. Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export SPEAR_CONTAINER_ROOTFS=${SPEAR_CONTAINER_ROOTFS:-$PWD/build/container-base}
[ "$(id -u)" = 0 ] || { echo "container_test: run this as root: it makes a Debian system and starts containers" >&2; exit 1; }

missing=()
for tool in buildah podman runc debootstrap; do command -v "$tool" >/dev/null || missing+=("$tool"); done
if [ ${#missing[@]} -gt 0 ]; then
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"
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
exec "${VENV:-.venv}/bin/python" -m pytest -q -rs -m container tests/sandbox "$@"
