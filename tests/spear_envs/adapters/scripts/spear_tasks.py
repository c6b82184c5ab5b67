"""What a user of verifiers writes: a module by whose name it finds the task set and the environment."""

from spear_envs.adapters.verifiers import VerifiersEnv, VerifiersTaskset

__all__ = ["VerifiersEnv", "VerifiersTaskset"]
