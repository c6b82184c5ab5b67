"""What verl's own vLLM server lacks on a CPU, for tests: vLLM's workers take new weights in vLLM's own way.

vLLM for a CPU keeps the weights of linear layers in another order and forgets how to load them one by one, as verl
does. How weights come (verl's sockets, shared memory and buckets) stays verl's.
"""

from typing import Any
from unittest.mock import patch

import torch
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from spear_agents.engines.tensors import share_weights
from spear_agents.engines.vllm_worker import WorkerExtension


class Extension(vLLMColocateWorkerExtension):
    """verl's extension of vLLM's workers, which gathers the buckets and then loads them by ours."""

    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> None:
        """Receive as verl does, then load."""
        self._held: dict[str, torch.Tensor] = {}
        with patch("vllm.model_executor.model_loader.utils.process_weights_after_loading"):  # the loading does it
            super().update_weights_from_ipc(*args, **kwargs)
        with share_weights(self._held) as path:
            WorkerExtension.load_weights(self, path)

    def _update_weights(self, weights: list[tuple[str, torch.Tensor]], peft_config: Any, base_sync_done: bool) -> None:
        self._held.update((name, tensor.clone()) for name, tensor in weights)
