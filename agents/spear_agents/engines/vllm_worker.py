"""What runs inside vLLM's worker processes.  vLLM imports it by name; nothing of vLLM is imported here."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import torch

_LOOK_EVERY_S = 1.0


class WorkerExtension:
    """Methods that vLLM adds to its workers (``worker_extension_cls``), called by :meth:`VLLMEngine.call_workers`."""

    model_runner: Any

    def give_log_probs_before_filters(self) -> bool:
        """Has log-probabilities taken at the sampling temperature before top-k and top-p.

        vLLM knows those of the model (before the temperature) and those after the filters; the convention of verl's
        rollouts lies between.  Returns whether this vLLM's sampler is built as expected.
        """
        sampler = getattr(self.model_runner, "sampler", None)
        filters = getattr(sampler, "topk_topp_sampler", None)
        if filters is None or getattr(sampler, "logprobs_mode", None) != "processed_logprobs":
            return False
        draw = filters.forward

        def forward(logits: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
            log_probs = logits.log_softmax(dim=-1, dtype=torch.float32)
            return draw(logits, *args, **kwargs)[0], log_probs

        # Its own ones are computed no more.
        filters.logprobs_mode = "raw_logprobs"
        filters.forward = forward
        return True

    def load_weights(self, path: str) -> None:
        """Replaces the model's weights by those that ``torch.save`` wrote to ``path``, in place.

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
        """Ends vLLM's first process ``core`` soon after the process ``owner``, which may be killed without notice.

        Returns the worker's own process.
        """
        threading.Thread(target=_end_after, args=(owner, core), name="end-with-owner", daemon=True).start()
        return os.getpid()


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
