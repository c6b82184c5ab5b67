"""A fine-tuning from its settings to a Hugging Face folder; ``python -m THIS RUN_FOLDER`` is its process."""

from __future__ import annotations

import difflib
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf, open_dict
from rich.progress import TextColumn

from spear_agents.engines.base import require_end_ids
from spear_agents.engines.hf import load_tokenizer
from spear_agents.evaluation.records import read_history
from spear_agents.model_files import resolve_model
from spear_agents.models import digest_model
from spear_envs.code.tasks import RETOOL_SFT, list_files
from spear_envs.core.errors import SpearError
from spear_envs.core.machine import make_command
from spear_envs.data.files import explain_unwritable, put_folder, write_json, write_text
from spear_sandbox.terminal import Console, Progress, RowsColumn
from spear_training.algorithms.schema import is_number
from spear_training.planning.fitting import find_room, fit_tuning
from spear_training.run.checkpoints import compare_configs, link_file
from spear_training.run.compose import check_plain, read_value
from spear_training.run.computing import check_exchange, choose_attention, choose_dtype, count_threads, measure_weights
from spear_training.run.config import AUTO, flatten
from spear_training.run.launch import CONFIG_FILE, find_checkpoint, read_folder
from spear_training.run.store import name_dtype
from spear_training.run.supervise import LOG_FILE, Observer, die_with_parent, hold_run, supervise_training
from spear_training.run.to_verl import find_verl
from spear_training.run.training import RESUME_HINT, Reading, show_progress
from spear_training.sft.samples import Overlong, Preparation, SampleReader, prepare_samples

SAMPLES = "samples"
MODEL = "model"
"""Folder of the result within the run."""
REPORT = "sft.json"
TRAINED_STEP = "train/loss"
"""Metric that every step has."""
CHANGEABLE = ("trainer.save_freq", "trainer.logger", "trainer.max_ckpt_to_keep", "trainer.default_local_dir",
              "trainer.project_name", "trainer.experiment_name", "data.train_files", "data.num_workers")  # fmt: skip
"""Settings that may differ when a run is resumed."""
KEYS = "sft_trainer_engine.yaml in the package verl.trainer.config"
"""File with all overrides of a fine-tuning."""
FIXED = {"trainer.nnodes": 1, "trainer.resume_mode": "auto", "trainer.test_freq": -1, "trainer.default_hdfs_dir": None,
         "trainer.total_training_steps": None, "data.val_files": None, "data.pad_mode": "no_padding"}  # fmt: skip
"""Keys of verl that can only have this value here."""
STRATEGIES = ("fsdp2", "fsdp")
COUNTS = ("data.train_batch_size", "data.max_length", "data.max_token_len_per_gpu", "trainer.n_gpus_per_node",
          "trainer.total_epochs", "trainer.max_ckpt_to_keep", "engine.ulysses_sequence_parallel_size")  # fmt: skip
"""Keys that are whole numbers from 1; verl divides by most of them."""


@dataclass(frozen=True)
class SftSettings:
    """Settings of a fine-tuning besides verl's own keys.

    Attributes:
        model: folder or name of any causal language model.
        data: ``.jsonl`` or ``.parquet`` files, or ``retool-sft``, which ``spear data get code`` fetches.
        preset: name of a YAML file here whose values replace those of ``sft.yaml``: ``retool``.
        epochs: passes over the samples. It and the next three have the preset's value if None, else that of
            ``sft.yaml``.
        batch: samples of an optimiser step.
        learning_rate: its highest value.
        max_length: longest sample in tokens; the model's context where that is shorter.
        keep_lost: learn from lost episodes too.
        seed: of the order of the samples.
        dtype: of the computation on a CPU, see :func:`spear_training.run.computing.choose_dtype`.
        overrides: ``KEY=VALUE``, of any key of verl's configuration.
    """

    model: Path
    data: tuple[Path, ...]
    device: str = "cpu"
    preset: str | None = None
    epochs: int | None = None
    batch: int | None = None
    learning_rate: float | None = None
    max_length: int | None = None
    overlong: Overlong = Overlong.DROP
    keep_lost: bool = False
    seed: int = 0
    dtype: str = AUTO
    overrides: tuple[str, ...] = ()


def read_model(folder: Path) -> tuple[int, int]:
    """Return the number of rows of a model's embedding, and its context in tokens. Raises SpearError for a folder
    without a model.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        text = config | (config.get("text_config") or {})
        vocabulary = int(text["vocab_size"])
        context = int(text.get("max_position_embeddings") or 2**31)
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise SpearError(f"{folder} is not a folder of a language model (config.json: {error})") from error
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise SpearError(f"{folder} holds no weights (*.safetensors): the download or the copy is not complete")
    return vocabulary, context


def choose_keys(settings: SftSettings) -> DictConfig:
    """Return verl's configuration with the values of the preset, the settings and the overrides.

    Raises SpearError for an invalid override.
    """
    config = _read_defaults(settings.device, settings.preset)
    own: dict[str, Any] = {
        "trainer.total_epochs": settings.epochs,
        "trainer.seed": settings.seed,
        "data.train_batch_size": settings.batch,
        "data.max_length": settings.max_length,
        "optim.lr": settings.learning_rate,
    }
    if settings.device == "cpu":
        own["engine.mixed_precision.param_dtype"] = settings.dtype
    elif settings.dtype not in (AUTO, "bfloat16"):
        raise SpearError(f"--dtype {settings.dtype} is for a CPU: on {settings.device} a fine-tuning is in bfloat16")
    for key, value in own.items():
        if value is not None:
            OmegaConf.update(config, key, value)
    for word in settings.overrides:
        _override(config, word)
    for key in COUNTS:
        count = OmegaConf.select(config, key)
        if type(count) is not int or count < 1:
            raise SpearError(f"{key} must be a whole number from 1, not {count!r}")
    every = config.trainer.save_freq
    if type(every) is not int or every == 0:
        raise SpearError(f"trainer.save_freq must be a whole number, or -1 for the end, not {every!r}")
    return config


def complete_keys(
    config: DictConfig, settings: SftSettings, out: Path, facts: dict[str, Any], longest: int
) -> DictConfig:
    """Return the configuration of :func:`choose_keys` for this machine, this folder and samples of up to ``longest``
    tokens.

    ``facts`` are what else makes it this run: digests of model and samples. Raises SpearError for a value that cannot
    be had here.
    """
    kernel = choose_attention(str(config.model.override_config.attn_implementation), settings.device)
    config.model.override_config.attn_implementation = kernel
    check_exchange(kernel, config.engine.ulysses_sequence_parallel_size)
    with open_dict(config):
        config.model.path = str(settings.model.resolve())
        config.data.train_files = str((out / SAMPLES).resolve())
        config.trainer.default_local_dir = str((out / "checkpoints").resolve())
        if settings.device == "cpu":
            precision = config.engine.mixed_precision
            chosen = str(precision.param_dtype)
            if chosen == AUTO and (out / CONFIG_FILE).is_file():
                chosen = str(read_tuning(out).engine.mixed_precision.param_dtype)
            precision.param_dtype = choose_dtype(chosen, measure_weights(settings.model))
        part = -(-longest // int(config.engine.ulysses_sequence_parallel_size))  # of a sample, on each of its ranks
        config.data.max_token_len_per_gpu = max(int(config.data.max_token_len_per_gpu), part)
        config.spear = facts
    if config.engine.strategy not in STRATEGIES:
        raise SpearError(f"engine.strategy can only be {' or '.join(STRATEGIES)} here, not {config.engine.strategy!r}")
    for key, value in FIXED.items():
        if OmegaConf.select(config, key) != value:
            raise SpearError(f"{key} can only be {value!r} here")
    return config


def _read_defaults(device: str, preset: str | None) -> DictConfig:
    """Return verl's configuration of its supervised trainer, ours over it, and a preset over that."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(find_verl() / "trainer" / "config"), version_base=None):
        config = compose("sft_trainer_engine")
    OmegaConf.set_struct(config, False)
    for name in ("sft", *(["sft_cpu"] if device == "cpu" else []), *([preset] if preset else [])):
        config.merge_with(OmegaConf.load(Path(__file__).parent / f"{name}.yaml"))
    return config


def _override(config: DictConfig, word: str) -> None:
    """Set ``KEY=VALUE``. Raises SpearError for a key that verl does not have, with the nearest, or a wrong value."""
    key, equals, _ = word.partition("=")
    if not equals or word.startswith("-"):
        raise SpearError(f"{word!r} is neither an option nor KEY=VALUE")
    known = dict(flatten(OmegaConf.to_container(config), keep_nodes=True))
    above = key.rpartition(".")[0]
    if key not in known and (above not in known or known[above] not in ({}, None)):
        near = difflib.get_close_matches(key, list(known), 1, cutoff=0.6)
        hint = f"did you mean {near[0]}?" if near else f"{KEYS} lists all keys"
        raise SpearError(f"{key!r} is not a key of the configuration; {hint}")
    before, value = known.get(key), read_value(word)
    check_plain(value, key)
    if isinstance(before, dict) and before and not isinstance(value, dict):
        raise SpearError(f"{key} must be a mapping of settings, not {value!r}")
    if is_number(before) and not is_number(value):
        raise SpearError(f"{key} must be a number, not {value!r}")
    if isinstance(before, bool) and not isinstance(value, bool):
        raise SpearError(f"{key} must be true or false, not {value!r}")
    OmegaConf.update(config, key, value)


def read_tuning(out: Path) -> DictConfig:
    """Read the configuration of a fine-tuning; see :func:`spear_training.run.launch.read_folder`."""
    return read_folder(out, "fine-tuning", _parse_tuning)


def _parse_tuning(values: Mapping[str, Any]) -> DictConfig:
    config = OmegaConf.create(dict(values))
    if OmegaConf.select(config, "engine.strategy") is None:
        raise SpearError("it lacks engine.strategy")
    return config


def find_files(data: Sequence[Path]) -> list[Path]:
    """Return the files of the data, which are paths or names. Raises SpearError for a data set that was not fetched."""
    files: list[Path] = []
    for item in data:
        named = RETOOL_SFT if str(item) == RETOOL_SFT.name and not item.exists() else None
        found = list_files(named) if named is not None else [item]
        if not found:
            raise SpearError(f"{item} is not on this machine: 'spear data get code {item}' fetches it")
        files += found
    return files


def count_steps(config: DictConfig, samples: int) -> tuple[int, int]:
    """Return the number of optimiser steps of an epoch and of the run.

    Raises SpearError if a batch does not divide over the ranks, or over the groups of ranks that share a sample, or is
    larger than the data.
    """
    batch, ranks = int(config.data.train_batch_size), int(config.trainer.n_gpus_per_node)
    size = int(config.engine.ulysses_sequence_parallel_size)
    if ranks % size:
        raise SpearError(f"engine.ulysses_sequence_parallel_size={size} does not divide {ranks} ranks")
    shares, each = ranks // size, "ranks" if size == 1 else f"groups of {size} ranks"
    if batch % shares:
        raise SpearError(f"a batch of {batch} does not divide over {shares} {each}: change --batch")
    steps = (samples // shares) // (batch // shares)
    if not steps:
        raise SpearError(f"{samples:,} samples are less than one batch of {batch}: collect more, or lower --batch")
    return steps, steps * int(config.trainer.total_epochs)


def run_sft(settings: SftSettings, out: Path, console: Console) -> Path:
    """Prepare the samples, train with a progress bar and return the folder of the new model.

    Run again with the same settings, it resumes after the last checkpoint.
    """
    settings = replace(settings, model=Path(resolve_model(str(settings.model), console)))
    if out.resolve() == settings.model.resolve():
        raise SpearError(f"--out {out} is the model's own folder: name another")
    with hold_run(out):
        return _run_sft(settings, out, console)


def _open_reader(model: Path) -> tuple[SampleReader, int]:
    """Return the reader of a model's samples, and its context in tokens."""
    vocabulary, context = read_model(model)
    tokenizer = load_tokenizer(model)
    return SampleReader(tokenizer, vocabulary, require_end_ids(model, tokenizer)), context


def _supervise(out: Path, config: DictConfig, observe: Observer) -> None:
    threads = count_threads(measure_weights(Path(str(config.model.path))), config.trainer.n_gpus_per_node)
    supervise_training(out, config.trainer.device, observe, module=__name__, threads=threads, locked=True)


def _run_sft(settings: SftSettings, out: Path, console: Console) -> Path:
    reader, context = _open_reader(settings.model)
    config = choose_keys(settings)
    limit = min(int(config.data.max_length), context)
    try:
        with Progress(TextColumn("{task.description}"), RowsColumn(), console=console, transient=True) as progress:
            task = progress.add_task("reading samples", total=None)

            def observe_rows(rows: int) -> None:
                if rows % 1000 == 0:
                    progress.update(task, completed=rows)

            found = prepare_samples(
                find_files(settings.data),
                reader,
                out / SAMPLES,
                max_length=limit,
                overlong=settings.overlong,
                keep_lost=settings.keep_lost,
                observer=observe_rows,
            )
            console.print(describe(found, limit), soft_wrap=True)
            identity = {"model_digest": digest_model(settings.model), "samples_digest": found.digest}
            config = complete_keys(config, settings, out, identity, found.longest)
            most = int(config.data.get("train_max_samples", -1))  # a key of verl's
            used = found.samples if most < 0 else min(most, found.samples)
            each, total = count_steps(config, used)
            path = out / CONFIG_FILE
            earlier = read_tuning(out) if path.is_file() else None
            given = {word.partition("=")[0] for word in settings.overrides}
            fit = fit_tuning(
                config, given, find_room(config.trainer.device, config.trainer.n_gpus_per_node), found.longest, earlier
            )
            if fit is not None and fit.describe():
                console.print(fit.describe(), soft_wrap=True, highlight=False)
            if earlier is not None:
                before, after = (dict(flatten(OmegaConf.to_container(one))) for one in (earlier, config))
                advice = "Name another --out, or give the old settings to resume"
                compare_configs(out, before, after, changeable=CHANGEABLE, advice=advice)
            if not (out / MODEL).is_dir():  # whose files were part of the last checkpoint
                find_checkpoint(out / "checkpoints", console)
            write_text(path, OmegaConf.to_yaml(config))
    except OSError as error:
        raise explain_unwritable(out, error) from error
    left = used - each * int(config.data.train_batch_size)
    if left:
        console.print(f"{left:,} samples, drawn again in each epoch, do not fill a batch and wait", soft_wrap=True)
    if (out / MODEL).is_dir():
        console.print(f"{out} has its {total:,} steps already: {out / MODEL}", soft_wrap=True)
        return out / MODEL
    try:
        with show_progress(console, total, "starting verl (a minute)", read_progress) as observe:
            _supervise(out, config, observe)
    except KeyboardInterrupt:
        step = max((record["step"] for record in read_history(out) if TRAINED_STEP in record), default=0)
        console.print(f"stopped after step {step}; {RESUME_HINT} from the last checkpoint")
        raise
    _take_model(out, total, config)
    losses = [record["train/loss"] for record in read_history(out) if TRAINED_STEP in record]
    write_json(out / REPORT, {"steps": total, "losses": losses, "samples": vars(found)})
    return out / MODEL


def _take_model(out: Path, step: int, config: DictConfig) -> None:
    """Move the model of the last step out of its checkpoint. Raises SpearError if it is not there."""
    made = out / "checkpoints" / f"global_step_{step}" / "huggingface"
    if not made.is_dir():
        raise SpearError(f"the training ended before step {step}: see {out / LOG_FILE}")
    draft = out / f".{MODEL}.part"
    try:
        shutil.rmtree(draft, ignore_errors=True)
        # Links: until the model has its name the checkpoint must stay as its manifest says, also on another disk.
        shutil.copytree(made, draft, copy_function=link_file)
        if config.trainer.device == "cpu":
            name_dtype(draft, str(config.engine.mixed_precision.param_dtype))
        put_folder(draft, out / MODEL)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise explain_unwritable(out / MODEL, error) from error
    shutil.rmtree(made, ignore_errors=True)


def read_progress(history: list[dict[str, Any]]) -> Reading | None:
    """Return how far a fine-tuning is."""
    steps = [record for record in history if TRAINED_STEP in record]
    if not steps:
        return None
    return steps[-1]["step"], f"loss {steps[-1]['train/loss'] or 0:.3f} · lr {steps[-1].get('train/lr') or 0:.1e}"


def describe(found: Preparation, limit: int) -> str:
    """Return one line on what was prepared, and what was left out."""
    parts = [
        (found.split, "rows in several samples, since the chat template rewrites earlier responses"),
        (found.lost, "of lost episodes left out"),
        (found.empty, "without a response left out"),
        (found.dropped, f"of more than {limit:,} tokens left out"),
        (found.truncated, f"cut off at {limit:,} tokens"),
        (found.unended, "do not end with an end token"),
        (found.misfits, "whose tokens read differently from their messages"),
    ]
    text = "".join(f"; {count:,} {what}" for count, what in parts if count)
    return f"{found.samples:,} samples of {found.tokens:,} tokens, {found.learnt:,} of them learnt{text}"


def main() -> None:
    """Run the fine-tuning that ``RUN_FOLDER/config.yaml`` describes, with a process of verl's for each rank."""
    from torch.distributed.run import main as run_ranks

    die_with_parent()
    out = Path(sys.argv[1])
    command = make_command("spear_training.verl_plugin.sft", str(out))
    ranks = read_tuning(out).trainer.n_gpus_per_node
    run_ranks(["--standalone", f"--nproc-per-node={ranks}", "--no-python", *command])


if __name__ == "__main__":
    main()
