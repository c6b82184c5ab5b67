"""Run folder of a training that a command line asks for; everything is checked before anything expensive starts."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf

from spear_agents.engines.vision import has_vision
from spear_agents.gateway.programs import resolve_program
from spear_agents.model_files import resolve_model
from spear_agents.models import find_snapshot
from spear_agents.play.chat import check_taken_keywords
from spear_agents.play.trajectory import Layout
from spear_envs.core.errors import SpearError
from spear_envs.data.files import decode_yaml, explain_unwritable, write_json, write_text
from spear_sandbox.terminal import Console
from spear_training.algorithms.choices import VoidFilter
from spear_training.algorithms.curriculum import Choice
from spear_training.planning.fitting import CARDS, Fit, find_room, fit_training
from spear_training.run.checkpoints import (
    OVERRIDE,
    check_files,
    check_origin,
    compare_configs,
    read_state,
    repair_tracker,
)
from spear_training.run.compose import Request, parse_config, read_config
from spear_training.run.computing import (
    TINY,
    check_lengths,
    check_rollouts,
    check_sequence_parallel,
    choose_attention,
    choose_dtype,
    measure_weights,
    read_threads,
    require_engine,
    require_loggers,
)
from spear_training.run.config import AUTO, LEVELS, Resume, RolloutEngine, RolloutType, RunConfig, flatten
from spear_training.run.custom_reward import load_custom_reward
from spear_training.run.environments import EnvironmentFacts, inspect_environment
from spear_training.run.inputs import TASKS_FILE, compare_inputs, describe_inputs
from spear_training.run.store import CheckpointStore, fetch_config, fetch_newer, publish
from spear_training.run.supervise import lock_run
from spear_training.run.to_verl import CHECKPOINTS, to_verl
from spear_training.step.tasks import check_branching, check_tasks

T = TypeVar("T")
CONFIG_FILE = "config.yaml"
"""A run's own :class:`RunConfig`, with what was chosen for the machine."""
POLICY = "policy"
"""Folder of a run's own warm start, if its configuration asks for one."""
CHANGEABLE = (
    "checkpoint",
    "cluster.device",
    "log",
    "record",
    "train.steps",
    "validation.every",
    "validation.at_start",
    "validation.only",
    "validation.keep_best",
    "validation.record",
    "verl.ray_kwargs",
    "verl.global_profiler",
    "verl.transfer_queue",
    "verl.trainer",
)
"""Settings that may change when a run is resumed."""
WORKERS = "rollout.workers"

MOST_EPISODES = 512
"""Concurrent episodes of a worker; each has an environment, which is reused in the next step."""
TURNS_OF_A_WORKER = 1700
"""Turns a second of a core in the slowest environment, WebShop, by ``spear bench loop``."""
TURNS_OF_A_GPU = 800
"""Expected maximum turns a second of one GPU's engine."""
HEADROOM = 2
"""Workers idle half of the time, so that bursts of responses are handled at once."""


@dataclass(frozen=True)
class Training:
    """A checked training: its configuration, resolved for this machine, and the environment."""

    config: RunConfig
    environment: EnvironmentFacts
    fit: Fit | None = None
    """How its updates fit into the memory; None if unknown."""


def prepare_training(request: Request, out: Path, console: Console | None = None) -> Training:
    """Resolve and check the training ``request`` for a run in ``out``.

    A missing model of the catalogue is fetched, shown on ``console``. Raises SpearError for values that contradict each
    other, a model, environment or file that is missing, or a training that does not fit.
    """
    config, given = request.config, request.given
    config.check_together()
    require_loggers(config.log)
    if config.checkpoint.store is not None:  # before a model is fetched
        store = CheckpointStore(config.checkpoint.store)
        store.check()
        fetch_config(store, out)
    earlier = read_run(out) if (out / CONFIG_FILE).is_file() else None
    config = config.change("model", path=_resolve_model(config, out, console))
    if config.rollout.agent is not None:
        config = config.change("rollout", agent=resolve_program(config.rollout.agent))
    reward = load_custom_reward(config.reward)
    if reward is not None:
        config = config.change("reward", function=reward.place)
    config = resolve_machine(config, earlier)
    environment = check_training(config)
    draft = to_verl(config, out)  # also checks the keys that it passes on
    room = find_room(config.cluster.device.value, config.cluster.gpus_per_node or 1)
    config, fit = fit_training(config, draft, given, room, earlier)
    return Training(config, environment, fit)


def resolve_machine(config: RunConfig, earlier: RunConfig | None = None, weights: int | None = None) -> RunConfig:
    """Replace what depends on the machine: ranks, attention, type of numbers, correction and rollout workers.

    Ranks and a type chosen by ``earlier``, the configuration of a resumed run, stay; ``weights``: bytes of the model,
    if it is not here.
    """
    device, rollout = config.cluster.device.value, config.rollout
    config = config.change("model", attention=choose_attention(config.model.attention, device))
    dtype = rollout.dtype.value
    if config.on_cpu:
        weights = weights or measure_weights(Path(str(config.model.path)))
        if dtype == AUTO and earlier is not None:
            dtype = earlier.rollout.dtype.value
        dtype = choose_dtype(dtype, weights)
        if config.cluster.gpus_per_node is None:
            ranks = choose_ranks(config, weights) if earlier is None else earlier.cluster.gpus_per_node
            config = config.change("cluster", gpus_per_node=ranks)
    elif dtype == AUTO:
        dtype = "bfloat16"
    correction = rollout.correction
    if rollout.staleness and not (correction.bypass_mode or correction.corrects):
        correction = replace(correction, rollout_is=LEVELS[0])  # old weights may have written the episodes
    config = config.change("rollout", dtype=RolloutType(dtype), correction=correction)
    return resolve_workers(config)


def choose_ranks(config: RunConfig, weights: float) -> int:
    """Choose the ranks of a training on this machine's cores; ``weights`` are the bytes of its policy.

    A tiny policy has a rank on each core, up to ``MOST_RANKS``, since its operations are too small for several threads.
    A larger one has one rank, whose operations do use them; so has a training of a few steps, for which another rank
    takes longer to start than it saves, and one with vLLM, which every rank would have anew.
    """
    train, rollout, unit = config.train, config.rollout, config.cluster.sequence_parallel
    if weights >= TINY or train.steps < LONG or rollout.engine is not RolloutEngine.TRANSFORMERS:
        return unit
    most = min(MOST_RANKS, len(os.sched_getaffinity(0)) // (read_threads() or 1))
    shared = math.gcd(train.batch_size, train.mini_batch_size) * rollout.group_size  # episodes that ranks divide evenly
    return max((ranks for ranks in range(unit, most + 1, unit) if shared % ranks == 0), default=unit)


def describe_ranks(config: RunConfig, threads: int) -> str:
    """Return one line on the ranks of a training on a CPU."""
    ranks = f"{config.ranks} rank{'s' if config.ranks > 1 else ''}"
    each = f"{'each ' if config.ranks > 1 else ''}with {threads} thread{'s' if threads > 1 else ''}"
    return f"{ranks}, {each} (cluster.gpus_per_node, OMP_NUM_THREADS)"


def resolve_workers(config: RunConfig) -> RunConfig:
    """Choose the number of rollout workers where it is open."""
    return config.change("rollout", workers=config.rollout.workers or count_workers(config))


def count_workers(config: RunConfig) -> int:
    """Choose the number of processes that play episodes.

    On a CPU it is one: its requests are batched in a canonical order, and the engine takes the cores. With GPUs there
    are enough to drive them at twice the need and to play all episodes at once, at least two so that one may die, and
    at most the machines' cores minus one for each GPU's engine. The machines are assumed to be like this one, unless it
    lacks a GPU.
    """
    if config.on_cpu:
        return 1
    gpus = config.ranks
    has_gpu = shutil.which(CARDS[0]) is not None
    room = len(os.sched_getaffinity(0)) * config.cluster.nodes - gpus if has_gpu else math.inf
    driven = math.ceil(HEADROOM * gpus * TURNS_OF_A_GPU / TURNS_OF_A_WORKER)
    return max(1, int(min(room, max(2, driven, math.ceil(count_episodes(config) / MOST_EPISODES)))))


def describe_workers(config: RunConfig) -> str:
    """Return one line on the workers of a training."""
    workers, episodes = config.rollout.workers or 1, count_episodes(config)
    each = math.ceil(episodes / workers)
    many = f"up to {each:,} episodes" if each <= MOST_EPISODES else f"{MOST_EPISODES} of {each:,} episodes"
    return f"{workers} rollout worker{'s' if workers > 1 else ''}, each with {many} at a time ({WORKERS})"


MOST_RANKS = 4
"""Ranks chosen at most: each holds a process of 1 GB."""
LONG = 8
"""Steps from which another rank saves more than it takes to start."""
VOID_TURNS = 0.05
"""Share of void turns in the example of :func:`describe_void`."""


def describe_void(config: RunConfig, turns: int) -> str | None:
    """Return one line on a filter that drops most of the long episodes; ``turns`` is the environment's limit.

    None if the filter is another, or less than a third of the episodes of an example leaves the loss.
    """
    dropped = 1.0 - (1.0 - VOID_TURNS) ** turns
    is_whole = config.filter.void is VoidFilter.TRAJECTORY and config.env.layout is Layout.PER_TURN
    if not is_whole or dropped < 1 / 3:
        return None
    return (
        f"filter.void=trajectory drops an episode for one turn without an action: with {VOID_TURNS:.0%} such turns, "
        f"{dropped:.0%} of the episodes of {turns} turns; filter.void=turn drops those turns alone"
    )


def count_episodes(config: RunConfig) -> int:
    """Return the most episodes of training that run at a time."""
    return config.train.batch_size * config.rollout.group_size * (1 + config.rollout.staleness)


def _resolve_model(config: RunConfig, out: Path, console: Console | None) -> str:
    name = config.model.path
    if name is None and config.model.is_made:
        return str((out / POLICY).resolve())
    if name is None:
        raise SpearError("no model: pass model.path=FOLDER (`spear warmstart` makes one), or model=tiny")
    path = Path(os.path.expanduser(name))
    is_hub_id = name.count("/") == 1 and not name.startswith((".", "/", "~"))
    if path.exists() or "/" not in name or find_snapshot(name) is not None:
        name = resolve_model(name, console)
        path = Path(os.path.expanduser(name))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise SpearError(f"{path} does not contain config.json: name a Hugging Face model folder")
        return str(path.resolve())
    if is_hub_id and not config.on_cpu:
        return name
    if is_hub_id and not path.parent.exists():
        raise SpearError(f"{name} is a model of the hub: on a CPU, `spear models get {name}` brings its folder")
    raise SpearError(f"the model folder {path} does not exist: make one with `spear warmstart` or name another")


def check_training(config: RunConfig) -> EnvironmentFacts:
    """Check a resolved configuration, starting only the environment.

    Raises SpearError if a setting is not supported by this model or environment, or the environment cannot be made.
    """
    check_rollouts(config.rollout, Path(str(config.model.path)))
    if config.on_cpu and not config.model.is_made:
        check_lengths(Path(str(config.model.path)), config.longest_row)
    check_taken_keywords(config.model.chat_options)
    branches = config.branch.share > 0
    # Before the model, which may come from the hub: missing data is found in seconds, without a network.
    wanted = config.validation.tasks if config.validation.tasks is not None else -1
    environment = inspect_environment(config.env, valid_tasks=wanted, branches=branches)
    name = str(config.model.path)
    made_here = config.model.is_made and not Path(name).is_dir()
    vision = config.model.vision_start is not None if made_here else has_vision(name)
    if vision and config.advantage.needs_critic:
        raise SpearError("a critic that reads pictures is not supported: choose another advantage.estimator")
    check_sequence_parallel(config.model, config.cluster.sequence_parallel, vision=vision)
    if branches:
        check_branching(
            layout=config.env.layout,
            program=config.rollout.agent,
            staleness=config.rollout.staleness,
            obstacle=environment.obstacle,
        )
    size, train = config.train.batch_size, environment.train
    tasks = train.tasks if config.train.max_tasks is None else min(config.train.max_tasks, train.tasks)
    if tasks < size:
        limit = f"train.max_tasks={tasks}" if tasks < train.tasks else f"the {tasks} tasks of the split {train.split}"
        raise SpearError(f"train.batch_size={size} exceeds {limit}")
    if config.filter.void is VoidFilter.INCOMPLETE and not environment.writes_tags:
        raise SpearError(
            f"filter.void=incomplete asks for <action>, which responses to the template {config.env.template} of "
            f"{environment.id} do not have: set filter.void=turn"
        )
    if config.curriculum.choice is not Choice.UNIFORM:
        check_tasks(tasks, train.split)
    if environment.shows_picture and not vision:
        raise SpearError(f"the prompt of {environment.id} shows a picture, and the model reads text")
    return environment


def read_folder(out: Path, kind: str, parse: Callable[[Mapping[str, Any]], T]) -> T:
    """Read the configuration of the run in ``out``, a ``kind`` of run whose values are checked by ``parse``.

    Raises SpearError if it cannot be read, or is of another kind of run: a training and a fine-tuning would replace
    each other's checkpoints.
    """
    path = out / CONFIG_FILE
    try:
        return parse(read_config(path))
    except SpearError as error:
        raise SpearError(f"{path} is not the configuration of a {kind} ({error}): name another folder") from error


def read_run(out: Path) -> RunConfig:
    """Read the configuration of a training; see :func:`read_folder`."""
    return read_folder(out, "training", RunConfig.from_mapping)


def prepare_run(training: Training, out: Path, console: Console | None = None, *, locked: bool = False) -> int | None:
    """Make the run folder and write its configuration; returns the step of the checkpoint to resume from, if any.

    With a store, a newer checkpoint there is fetched, and one missing there is uploaded. Raises SpearError if the
    folder cannot be written, is a run of another configuration or of other data, or in use by another training (unless
    ``locked``: the caller holds its lock), the engine is not installed, or the store fails.
    """
    config = training.config
    require_engine(config.rollout.engine)
    checkpoints = out / CHECKPOINTS
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".write-test"
        probe.write_bytes(b"x" * 65536)
        probe.unlink()
    except OSError as error:
        raise explain_unwritable(out, error) from error
    url = config.checkpoint.store
    store = CheckpointStore(url) if url is not None else None
    is_exact = config.checkpoint.resume is Resume.EXACT

    # The number of workers depends on the machine's cores; runs with GPUs are not reproducible bit by bit anyway.
    changeable: Collection[str] = CHANGEABLE if config.on_cpu else (*CHANGEABLE, WORKERS)
    own = dict(flatten(config.to_mapping()))

    def verify(folder: Path) -> None:
        check_origin(folder, own, exact=is_exact, changeable=changeable)
        if is_exact:
            compare_inputs(out, read_state(folder).get("inputs"), inputs)

    inputs = describe_inputs(config, training.environment, changeable=CHANGEABLE)
    with nullcontext() if locked else lock_run(out):  # the files of a running training must not change either
        if store is not None and is_exact and (stored := store.read(CONFIG_FILE)) is not None:
            # Checkpoints of this run would replace those of another.
            before = parse_config(f"{store.url}/{CONFIG_FILE}", partial(decode_yaml, stored))
            advice = f"Name another checkpoint.store, give the old settings, or add {OVERRIDE} to continue there"
            compare_configs(store.url, dict(flatten(before)), own, changeable=changeable, advice=advice)
        fetched = fetch_newer(store, out, verify) if store is not None else None
        if fetched is not None and console is not None:
            console.print(f"fetched the checkpoint of step {fetched} from {url}", soft_wrap=True, highlight=False)
        checkpoint = find_checkpoint(checkpoints, console)
        if checkpoint is not None:
            verify(checkpoints / f"global_step_{checkpoint}")
        write_text(out / CONFIG_FILE, OmegaConf.to_yaml(OmegaConf.create(config.to_mapping())))
        write_json(out / TASKS_FILE, inputs)
        if store is not None and checkpoint is not None and fetched is None:
            publish_run(config, out, console)
    return checkpoint


def find_checkpoint(checkpoints: Path, console: Console | None) -> int | None:
    """Return the step of the newest whole checkpoint, whose files are checked; say on ``console`` if all are
    unfinished.
    """
    step = repair_tracker(checkpoints)
    if step is not None:
        check_files(checkpoints / f"global_step_{step}")
    elif console is not None and any(checkpoints.glob("global_step_*")):
        console.print(f"{checkpoints} holds no complete checkpoint: the run begins anew", soft_wrap=True)
    return step


def publish_run(config: RunConfig, out: Path, console: Console | None = None) -> None:
    """Upload the newest checkpoint of a run to its store, if that lacks it. Raises SpearError if the store fails."""
    url, step = config.checkpoint.store, repair_tracker(out / CHECKPOINTS)
    if url is None or step is None:
        return
    try:
        sent = publish(CheckpointStore(url), out, step, config.checkpoint.keep)
    except SpearError as error:
        raise SpearError(
            f"step {step} is saved in {out} but not in the store; the same command tries again. {error}"
        ) from error
    if sent and console is not None:
        console.print(f"uploaded the checkpoint of step {step} to {url}", soft_wrap=True, highlight=False)
