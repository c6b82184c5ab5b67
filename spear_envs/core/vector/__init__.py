"""Many environments stepped together, in this process or in several."""

from spear_envs.core.vector.batching import batch_infos, batch_observations
from spear_envs.core.vector.env import (
    SpearVectorEnv,
    make_vector_env,
    read_autoreset_mode,
    read_indices,
    read_reset_mask,
    read_seeds,
)

__all__ = [
    "SpearVectorEnv",
    "batch_infos",
    "batch_observations",
    "make_vector_env",
    "read_autoreset_mode",
    "read_indices",
    "read_reset_mask",
    "read_seeds",
]
