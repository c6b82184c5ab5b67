"""verl's supervised trainer on prepared samples: ``python -m spear_training.verl_plugin.sft RUN``, once a rank."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch.utils.data import Dataset
from verl.trainer.sft_trainer import SFTTrainer
from verl.utils.distributed import destroy_global_process_group, initialize_global_process_group

from spear_training.run.checkpoints import clear_unfinished, finish_checkpoint, remove_old
from spear_training.run.launch import CONFIG_FILE
from spear_training.sft.samples import open_store


class SampleDataset(Dataset):
    """One item a sample: ``input_ids``, ``loss_mask`` and ``position_ids``, all int64 [L].

    verl names a dataset by ``data.custom_cls``; ``data.train_files`` holds the folder of the samples.
    """

    def __init__(self, parquet_files, tokenizer, config, processor=None, max_samples: int = -1) -> None:
        self._samples = open_store(Path(str(parquet_files)))
        self._length = len(self._samples) if max_samples < 0 else min(max_samples, len(self._samples))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self._length:
            raise IndexError(index)
        ids, mask = (torch.from_numpy(values.astype("int64")) for values in self._samples[index])
        return {"input_ids": ids, "loss_mask": mask, "position_ids": torch.arange(len(ids))}


class SpearSFTTrainer(SFTTrainer):
    """verl's trainer with the order of the samples drawn from ``trainer.seed``, which verl itself does not read."""

    def __init__(self, config) -> None:
        super().__init__(config)
        if self.resume_global_step and self.resume_global_step % self.steps_per_epoch == 0:
            # The loader was saved at the end of an epoch and would yield nothing: verl would skip the next epoch.
            self._build_dataloader()
            self.ckpt_handler.train_dataloader = self.train_dataloader

    def _build_ckpt_handler(self) -> None:
        super()._build_ckpt_handler()
        save, checkpoints = self.ckpt_handler.save_checkpoint, Path(str(self.config.trainer.default_local_dir))
        # Told to keep one, verl removes the one before while the new one is not whole yet; it goes below.
        self.ckpt_handler.max_ckpt_to_keep = max(2, self.config.trainer.max_ckpt_to_keep)

        def save_whole(step: int) -> None:
            if dist.get_rank() == 0:  # the others write after a barrier, which verl has once the folder is made
                clear_unfinished(checkpoints / f"global_step_{step}")
            save(step)  # its last act waits for the other ranks
            if dist.get_rank() == 0:
                finish_checkpoint(checkpoints / f"global_step_{step}")
                remove_old(checkpoints, self.config.trainer.max_ckpt_to_keep)

        self.ckpt_handler.save_checkpoint = save_whole

    def _build_dataloader(self) -> None:
        super()._build_dataloader()
        self.train_sampler.seed = int(self.config.trainer.seed)


def main() -> None:
    """Train one rank of the run that ``RUN_FOLDER/config.yaml`` describes."""
    config: Any = OmegaConf.load(Path(sys.argv[1]) / CONFIG_FILE)
    OmegaConf.set_struct(config, True)
    if config.trainer.device == "cpu":
        # verl would ask for the backend "cpu:gloo,cpu:gloo", which torch refuses as a duplicate.
        dist.init_process_group("gloo")
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    else:
        initialize_global_process_group()
    try:
        SpearSFTTrainer(config).fit()
    finally:
        destroy_global_process_group()


if __name__ == "__main__":
    main()
