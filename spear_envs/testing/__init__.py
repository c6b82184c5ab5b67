"""Checking that an environment keeps the contract: ``check_spear_env``."""

from spear_envs.testing.checks import ContractError
from spear_envs.testing.runner import CheckReport, CheckResult, check_spear_env

__all__ = ["CheckReport", "CheckResult", "ContractError", "check_spear_env"]
