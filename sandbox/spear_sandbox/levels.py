"""Choosing the isolation: the strongest that holds is taken, a weak one only on request."""

from __future__ import annotations

import logging
import sys

from spear_sandbox.cgroups import Groups
from spear_sandbox.cold import BwrapBackend, WeakBackend
from spear_sandbox.installation import Installation, find_installation
from spear_sandbox.protocol import FaultKind, Isolation, Limits, SandboxFault
from spear_sandbox.runs import Backend
from spear_sandbox.selftest import Probe, probe_backend
from spear_sandbox.warm import WarmBackend
from spear_sandbox.zygotes import RefusedError

logger = logging.getLogger(__name__)

EXIT_CODE = 78
"""Exit code of a service if no isolation holds: EX_CONFIG."""
GUEST_UID = 10001
"""User of the programs where the pool belongs to root."""

_STRONG = (Isolation.NAMESPACES, Isolation.BWRAP)
_REMEDY = (
    "To fix it: in a container, start it with the seccomp profile spear_sandbox/deploy/seccomp.json and all of /proc "
    "(docker run --security-opt seccomp=… --security-opt systempaths=unconfined; "
    "with AppArmor also apparmor=unconfined; podman: unmask=ALL); "
    "on a host, allow user namespaces (sysctl user.max_user_namespaces=10000, "
    "kernel.unprivileged_userns_clone=1 on Debian, kernel.apparmor_restrict_unprivileged_userns=0 on Ubuntu). "
    "To accept weaker isolation, say so: --allow-weak-isolation landlock, or isolation='landlock' in Python."
)
_APPARMOR = (
    "'Permission denied' for a mount comes from AppArmor's profile for containers: start the container with "
    "--security-opt apparmor=unconfined, or load spear_sandbox/deploy/apparmor.profile and name it: "
    "apparmor=spear-sandbox. "
)


class IsolationRefusedError(SandboxFault):
    """No permitted level holds here; the message names the failed probes, the remedy and the flag."""

    def __init__(self, message: str) -> None:
        super().__init__(FaultKind.UNAVAILABLE, message)


async def choose_backend(
    isolation: str, installation: Installation, *, zygotes: int, uid: int = GUEST_UID, limits: Limits | None = None
) -> Backend:
    """Start this level or, for ``"auto"``, the first strong one that holds, or raise IsolationRefusedError."""
    failures = []
    for level in _STRONG if isolation == "auto" else (Isolation(isolation),):
        backend = _make_backend(level, installation, zygotes=zygotes, uid=uid, limits=limits or Limits())
        try:
            probes = await _test(backend, uid)
        except BaseException:  # cancelled
            await backend.close()
            raise
        failed = [probe for probe in probes if not probe.ok]
        if not failed:
            if level.weak:
                logger.warning("weak isolation %r: programs share this machine with everything else", level.value)
            return backend
        await backend.close()
        shown = "; ".join(f"probe {probe.name!r} failed ({probe.detail})" for probe in failed[:3])
        failures.append(f"{level.value}: {shown}")
    shown = ". ".join(failures)
    first = _APPARMOR if "mount" in shown and "Permission denied" in shown else ""
    raise IsolationRefusedError(f"No isolation holds here. {shown}. {first}{_REMEDY}")


async def examine(level: Isolation, *, uid: int = GUEST_UID, installation: Installation | None = None) -> list[Probe]:
    """Run every probe of this level; the first is its start."""
    found = installation or find_installation()
    backend = _make_backend(level, found, zygotes=1, uid=uid, limits=Limits())
    try:
        return await _test(backend, uid)
    finally:
        await backend.close()


async def _test(backend: Backend, uid: int) -> list[Probe]:
    try:
        await backend.start()
    except (RefusedError, SandboxFault, OSError) as error:
        return [Probe("start", False, str(error))]
    return [Probe("start", True, ""), *await probe_backend(backend, uid=uid)]


def _make_backend(level: Isolation, installation: Installation, *, zygotes: int, uid: int, limits: Limits) -> Backend:
    if sys.platform != "linux":
        raise IsolationRefusedError("The sandbox needs Linux: run it in a container or on another host.")
    groups = Groups.find()
    if level is Isolation.NAMESPACES:
        return WarmBackend(installation, zygotes=zygotes, uid=uid, groups=groups)
    kind = BwrapBackend if level is Isolation.BWRAP else WeakBackend
    return kind(level, installation, uid=uid, limits=limits, groups=groups)
