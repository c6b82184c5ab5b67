"""Faults: failures of an environment's services, which must not count against the policy."""

from __future__ import annotations

from spear_envs.core.errors import SpearError


class EnvFault(SpearError):
    """A hook of an environment failed because a sandbox, a retriever or another service did, not the policy.

    ``SpearEnv.step`` turns it into ``truncated=True``, reward 0 and ``info["fault"] = kind``, so that a trainer can
    leave the trajectory out of its loss and statistics. ``SpearEnv.reset`` raises it.

    Args:
        kind: short stable name, for counting, such as ``"retriever_timeout"``.
    """

    def __init__(self, kind: str, message: str = "") -> None:
        super().__init__(kind, message)
        self.kind = kind
        self.message = message

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}" if self.message else self.kind
