#!/usr/bin/env bash
# Build the images `sandbox` and `envs` and run them as their pages say, with no Docker engine: buildah, podman and runc,
# as root; then the services of compose.yaml with podman-compose.
#
# Installs these tools by apt and pip if they are missing, makes a small Debian system in build/container-base with
# debootstrap (kept for the next time) instead of the public Python image, and runs the tests that need containers.
# LARGE=1 also builds `train-cpu` and trains in it (some 10 GB of disk while it lasts). Further arguments go to pytest.
#
# Ends with 69, and a last line that says why, where the machine has not what containers need; with 1 where a test fails.
#
#   SPEAR_CONTAINER_STORE  folder in which images are kept for the next time (default: a temporary one)
#   TORCH_INDEX            index that has PyTorch's CPU wheels, if pip's own has not
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

refuse() { echo "container_test: this machine runs no containers: $*" >&2; exit 69; }

# Before anything is installed: namespaces and mounts, of which every container is made.
[ "$(id -u)" = 0 ] || refuse "only root may start them as these tests do"
awk '{users += $3} END {exit users < 65536}' /proc/self/uid_map || refuse "its root has no users to give away"
said=$(unshare --mount --pid --net --ipc --uts --fork sh -c 'mount -t tmpfs none /mnt && mount -t proc none /mnt' 2>&1) ||
    refuse "$(tail -n 1 <<<"$said")"
command -v apt-get >/dev/null || refuse "their tools come by apt, which it has not"

# The network of containers and their first process are recommendations of Debian's podman; Ubuntu lacks Debian's keys.
missing=()
for tool in buildah podman runc debootstrap; do command -v "$tool" >/dev/null || missing+=("$tool"); done
# netavark calls iptables, which podman only suggests.
command -v iptables >/dev/null || missing+=(iptables)
[ -e /usr/lib/podman/aardvark-dns ] || missing+=(netavark aardvark-dns)
[ -e /usr/libexec/podman/catatonit ] || missing+=(catatonit)
[ -e /usr/share/keyrings/debian-archive-keyring.gpg ] || missing+=(debian-archive-keyring)
if [ ${#missing[@]} -gt 0 ]; then
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"; } ||
        refuse "apt does not bring ${missing[*]}"
fi
# Debian's podman-compose is too old for this file.
export PODMAN_COMPOSE=${PODMAN_COMPOSE:-$PWD/build/podman-compose/bin/podman-compose}
python=${VENV:-.venv}/bin/python
if [ ! -x "$PODMAN_COMPOSE" ]; then
    "$python" -m venv --clear --without-pip build/podman-compose
    "$python" -m pip --python build/podman-compose/bin/python install -q --disable-pip-version-check \
        podman-compose==1.6.0 python-dotenv==1.2.4 PyYAML==6.0.3
fi
export SPEAR_CONTAINER_ROOTFS=${SPEAR_CONTAINER_ROOTFS:-$PWD/build/container-base}
if [ ! -e "$SPEAR_CONTAINER_ROOTFS/usr/bin/python3" ]; then
    rm -rf "$SPEAR_CONTAINER_ROOTFS.new"
    mkdir -p "$SPEAR_CONTAINER_ROOTFS.new"
    echo "container_test: making $SPEAR_CONTAINER_ROOTFS"
    debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm \
        "$SPEAR_CONTAINER_ROOTFS.new" >"$SPEAR_CONTAINER_ROOTFS.log" 2>&1 || {
        tail "$SPEAR_CONTAINER_ROOTFS.log" >&2
        said=$(grep -E "^E: (Failed getting release file|Couldn't download|Cannot install into target)" \
            "$SPEAR_CONTAINER_ROOTFS.log") && refuse "$said"
        exit 1
    }
    # A proxy of this machine may have certificates of its own; pip in the image goes the same way out.
    cp /etc/ssl/certs/ca-certificates.crt "$SPEAR_CONTAINER_ROOTFS.new/etc/ssl/certs/"
    rm -rf "$SPEAR_CONTAINER_ROOTFS.new/var/cache/apt" "$SPEAR_CONTAINER_ROOTFS.new/var/lib/apt/lists"
    mv "$SPEAR_CONTAINER_ROOTFS.new" "$SPEAR_CONTAINER_ROOTFS"
fi
select="container and not large"
if [ -n "${LARGE:-}" ]; then select=container; fi
exec "$python" -m pytest -q -rs -m "$select" tests/containers "$@"
