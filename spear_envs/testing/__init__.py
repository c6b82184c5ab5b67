"""Checking that an environment keeps the contract: ``check_spear_env``."""

from spear_envs.testing.report import CheckReport, CheckResult, ContractError
from spear_envs.testing.runner import check_spear_env

__all__ = ["CheckReport", "CheckResult", "ContractError", "check_spear_env"]
