"""What runs inside vLLM's worker processes. vLLM imports it by name; nothing of vLLM is imported here."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from spear_agents.engines.sampling import filter_probs, invert_mass, uniform_at
from spear_agents.engines.vllm_options import SEED

_LOOK_EVERY_S = 1.0


class WorkerExtension:
    """Methods that vLLM adds to its workers (``worker_extension_cls``), called by :meth:`VLLMEngine.call_workers`."""

    model_runner: Any

    def replace_sampling(self) -> bool:
        """Has tokens drawn as the ``hf`` engine draws them, and their log-probabilities taken before top-k and top-p.

        vLLM fills a row of noise as long as the vocabulary for each seeded request; here a request's seed
        (``extra_args``) and the number of its tokens so far give one uniform number. Log-probabilities of vLLM's are
        those of the model (before the temperature) or those after the filters; the convention of verl's rollouts lies
        between. Returns whether this vLLM's sampler is built as expected.
        """
        runner = self.model_runner
        sampler = getattr(runner, "sampler", None)
        filters = getattr(sampler, "topk_topp_sampler", None)
        if filters is None or getattr(sampler, "logprobs_mode", None) != "processed_logprobs":
            return False

        def forward(
            logits: torch.Tensor, generators: Any, k: torch.Tensor | None, p: torch.Tensor | None
        ) -> tuple[torch.Tensor, torch.Tensor]:
            log_probs = logits.log_softmax(dim=-1, dtype=torch.float32)
            probs = log_probs.exp()
            if k is not None or p is not None:
                count = len(probs)
                top_k = torch.zeros(count, dtype=torch.long, device=probs.device) if k is None else k.long()
                top_p = torch.ones(count, dtype=torch.float64, device=probs.device) if p is None else p.double()
                probs = filter_probs(probs, top_k, top_p)
            rows = [runner.requests[name] for name in runner.input_batch.req_ids]
            uniform = draw_uniform(rows) if len(rows) == len(probs) else np.zeros(len(probs))  # a trial run has no rows
            return invert_mass(probs, torch.from_numpy(uniform).to(probs.device)), log_probs

        filters.forward = forward
        return True

    def load_weights(self, path: str) -> None:
        """Replace the model's weights by those that ``torch.save`` wrote to ``path``, in place.

        On a CPU vLLM keeps the weights of linear layers in another order: ``reload_weights`` makes that anew, which
        ``model.load_weights`` does not.
        """
        state = torch.load(path, mmap=True, weights_only=True)
        self.model_runner.reload_weights(weights_iterator=iter(state.items()))
        # vLLM 0.31 forgets layers that get no weight of their own: an output layer that is tied to the embedding would
        # go on with its old order of the old weights.
        owners: dict[int, list[Any]] = {}
        for layer in self.model_runner.get_model().modules():
            for weight in layer.parameters(recurse=False):
                owners.setdefault(id(weight), []).append(layer)
        for layers in owners.values():
            for layer in layers if len(layers) > 1 else ():
                layer.quant_method.process_weights_after_loading(layer)

    def end_with(self, owner: int, core: int) -> int:
        """End vLLM's first process ``core`` soon after the process ``owner``, which may be killed without notice.

        Returns the worker's own process.
        """
        threading.Thread(target=_end_after, args=(owner, core), name="end-with-owner", daemon=True).start()
        return os.getpid()


def draw_uniform(rows: Sequence[Any]) -> np.ndarray:
    """The next uniform number of each of vLLM's requests: float64 [N] in [0, 1)."""
    seeds = np.array([row.sampling_params.extra_args[SEED] for row in rows], dtype=np.uint64)
    return uniform_at(seeds, np.array([len(row.output_token_ids) for row in rows], dtype=np.uint64))


def _end_after(owner: int, core: int) -> None:
    while _is_alive(owner):
        time.sleep(_LOOK_EVERY_S)
    # It ends its workers and gives their shared memory back.
    os.kill(core, signal.SIGTERM)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
