"""The configuration of a training: every setting that ``spear train`` takes, with its unit, range and default.

``--help``, the reference page and the JSON schema are made from these classes; :mod:`spear_training.run.to_verl` writes
what verl reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field, fields, replace
from enum import Enum
from typing import Any

from pydantic import Field, ValidationInfo, field_validator
from pydantic.dataclasses import dataclass

from spear_agents.play.trajectory import Layout
from spear_envs.core.errors import SpearError
from spear_envs.core.making import find_splits
from spear_training.algorithms.choices import Aggregation, Singleton
from spear_training.algorithms.curriculum import Choice
from spear_training.algorithms.schema import STRICT, Record, SettingsError, number
from spear_training.algorithms.settings import (
    AdvantageSettings,
    BaselineSettings,
    BranchSettings,
    ClipSettings,
    CovarianceSettings,
    CriticSettings,
    CurriculumSettings,
    FilterSettings,
    KlSettings,
    LossSettings,
    ReplaySettings,
    RewardSettings,
    SamplingSettings,
    SilSettings,
    SpearSettings,
)

AUTO = "auto"


class Device(str, Enum):
    """Where a training computes."""

    CPU = "cpu"
    CUDA = "cuda"


class Strategy(str, Enum):
    """How verl shards a model."""

    FSDP2 = "fsdp2"
    FSDP = "fsdp"


class RolloutEngine(str, Enum):
    """Engine that generates responses."""

    TRANSFORMERS = "transformers"
    VLLM = "vllm"
    """vLLM on GPUs."""
    VLLM_CPU = "vllm_cpu"
    """vLLM's build for CPUs."""


class RolloutType(str, Enum):
    """Type of the numbers of rollouts; on a CPU the trainer computes in the same one."""

    AUTO = AUTO
    """bfloat16 on a GPU, and on a CPU that multiplies it faster, unless the model is tiny; else float32."""
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Schedule(str, Enum):
    """Learning rate after the warm-up."""

    CONSTANT = "constant"
    COSINE = "cosine"


class Resume(str, Enum):
    """Allowed differences between a checkpoint and the run that resumes it."""

    EXACT = "exact"
    """No difference is allowed: the run continues bit by bit as if it had not been stopped."""
    CHANGED = "changed"
    """Settings and code, as long as they match the saved state."""


@dataclass(frozen=True, config=STRICT)
class ModelSettings(Record, path="model"):
    """The policy."""

    path: str | None = None
    """Folder of a Hugging Face model, or a name (`spear models list`) or hub id to download."""
    attention: str = AUTO
    """Attention kernel of transformers; auto takes flash_attention_2 if it can be imported, else sdpa."""
    trust_remote_code: bool = False
    """Whether code of the model's folder runs."""
    chat_options: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of the chat template, such as enable_thinking."""
    gradient_checkpointing: bool = True
    """Whether activations are computed again in the backward pass; chosen by free memory unless you set it."""
    lora_rank: int = number(0, at_least=0)
    """Rank of a LoRA adapter, which alone is trained; 0 trains all weights."""
    lora_alpha: int = number(16, at_least=1)
    """Scale of the adapter."""
    warm_start: Mapping[str, Any] | None = None
    """Make a tiny policy before the training: changes to its recipe (`spear warmstart`)."""
    vision_start: Mapping[str, Any] | None = None
    """The same for a tiny policy that reads pictures."""

    @property
    def is_made(self) -> bool:
        """Whether the run makes its own tiny policy before it starts."""
        return self.warm_start is not None or self.vision_start is not None


@dataclass(frozen=True, config=STRICT)
class EnvironmentSettings(Record, path="env"):
    """The environment and its prompts."""

    id: str = "spear/Sokoban-v1"
    """Name for `gym.make`; MODULE:NAME imports the module that registers it."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of `gym.make` besides the split."""
    train_split: str = "train"
    """Tasks to train on."""
    valid_split: str = "valid"
    """Tasks of the validation; null for the second of the environment's splits."""
    template: str = "default"
    """Prompt template of the environment."""
    layout: Layout = Layout.PER_TURN
    """Rows of an episode: per_turn (a prompt for each turn) or conversation (one row)."""
    history: int = number(2, at_least=0)
    """Earlier turns shown in a per_turn prompt."""
    max_turn_tokens: int | None = number(None, above=0)
    """Longest response of a turn in tokens; null for what is left of rollout.max_response_length."""

    @field_validator("valid_split", mode="before")
    @classmethod
    def _choose_split(cls, value: Any, info: ValidationInfo) -> Any:
        splits = find_splits(info.data["id"]) if value is None and "id" in info.data else ()
        return (splits[1:] or splits)[0] if splits else value


LEVELS = ("token", "sequence")
REJECTIONS = (
    *("token_k1", "token_k2", "token_k3"),
    *("seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3"),
    *("seq_max_k2", "seq_max_k3"),
)
"""Quantities with a threshold: a divergence of a token, or its sum, mean or maximum over a row."""
_NODE = "rollout.correction"


@dataclass(frozen=True, config=STRICT)
class RolloutCorrection(Record, path=_NODE):
    """Weights and rejections of sampled tokens, r = pi_trainer / pi_rollout; names and meanings are verl's."""

    rollout_is: str | None = None
    """The weight of a token: its own r (token) or the product of its row's (sequence); null: no weights."""
    rollout_is_threshold: str | float = 2.0
    """A number truncates weights; LOWER_UPPER zeroes those outside (masked importance sampling, IcePop)."""
    rollout_is_batch_normalize: bool = False
    """Whether the weights are divided by their mean over the step."""
    rollout_rs: str | None = None
    """Rejections by commas (token_k1, seq_mean_k3, ...); such tokens leave the loss and its denominator; null: none."""
    rollout_rs_threshold: str | float | None = None
    """One for all rejections or one each: of r, LOWER_UPPER or the upper one, for k1; the maximum for k2 and k3."""
    bypass_mode: bool = False
    """Whether the log-probs of the rollout are those of the old policy, which saves a pass of the trainer."""

    def check(self) -> None:
        if self.rollout_is is not None and self.rollout_is not in LEVELS:
            raise SpearError(f"{_NODE}.rollout_is must be null, {' or '.join(LEVELS)}, not {self.rollout_is!r}")
        _check_bounds("rollout_is_threshold", self.rollout_is_threshold)
        if self.bypass_mode and self.corrects:
            raise SpearError(f"{_NODE}.rollout_is and rollout_rs have no effect with {_NODE}.bypass_mode=true")
        if self.rollout_rs is None:
            return
        named = list(dict.fromkeys(name.strip() for name in str(self.rollout_rs).split(",")))
        for name in named:
            if name not in REJECTIONS:
                raise SpearError(f"{_NODE}.rollout_rs={name!r} is unknown: take some of {', '.join(REJECTIONS)}")
        if self.rollout_rs_threshold is None:
            raise SpearError(f"{_NODE}.rollout_rs={self.rollout_rs} needs {_NODE}.rollout_rs_threshold")
        bounds = str(self.rollout_rs_threshold).split(",")
        if len(bounds) not in (1, len(named)):
            raise SpearError(f"{_NODE}.rollout_rs_threshold must be one threshold, or one each of {self.rollout_rs}")
        for name, bound in zip(named, bounds * len(named) if len(bounds) == 1 else bounds, strict=True):
            _check_bounds("rollout_rs_threshold", bound, both=name.endswith("k1"))

    @property
    def corrects(self) -> bool:
        """Whether anything is weighted or rejected."""
        return self.rollout_is is not None or self.rollout_rs is not None


def describe_staleness(ahead: int, correction: RolloutCorrection) -> str:
    """Return one line on episodes played up to ``ahead`` steps early, and on the correction for their old weights."""
    cut = f"weights of each {correction.rollout_is}, cut at {correction.rollout_is_threshold}"
    rejected = f"rejection by {correction.rollout_rs}" if correction.rollout_rs else None
    chosen = [cut if correction.rollout_is else None, rejected]
    if correction.bypass_mode:
        chosen = ["the clipped ratio to the policy that played"]
    how = " and ".join(filter(None, chosen))
    plural = "s" if ahead > 1 else ""
    return (
        f"episodes start up to {ahead} step{plural} ahead, by weights up to {ahead} version{plural} old; "
        f"corrected by {how}"
    )


def _check_bounds(key: str, given: str | float, *, both: bool = True) -> None:
    parts = str(given).strip().split("_") if both else [str(given)]
    try:
        bounds = [float(part) for part in parts]
    except ValueError:
        bounds = []
    if len(bounds) not in (1, 2) or not 0 < bounds[0] <= bounds[-1] < float("inf"):
        form = "a number above 0 or LOWER_UPPER, as 0.5_2.0" if both else "a number above 0"
        raise SpearError(f"{_NODE}.{key} must be {form}, not {given!r}")


@dataclass(frozen=True, config=STRICT)
class RolloutSettings(Record, path="rollout"):
    """Episodes of the training and what generates them."""

    engine: RolloutEngine = RolloutEngine.TRANSFORMERS
    """Engine that generates responses: transformers, vllm (GPUs) or vllm_cpu."""
    group_size: int = number(8, at_least=1)
    """Episodes of each task, whose rewards are compared."""
    # The trainer's log-probs are at this temperature, which divides logits: 0 has none.
    temperature: float = number(1.0, above=0)
    """Sampling temperature."""
    top_p: float = number(1.0, above=0, at_most=1)
    """Probability mass of the tokens sampled from."""
    top_k: int = number(-1, at_least=-1)
    """Number of the tokens sampled from; -1 for all."""
    max_prompt_length: int = number(1024, at_least=1)
    """Longest prompt of a row in tokens; an episode whose next prompt is longer ends there."""
    max_response_length: int = number(1024, at_least=1)
    """Longest response of a row in tokens; in a conversation, of all turns and observations."""
    dtype: RolloutType = RolloutType.AUTO
    """Type of the numbers: auto, float32, bfloat16 or float16."""
    tensor_parallel: int = number(1, at_least=1)
    """GPUs that share a copy of the model."""
    gpu_memory: float = number(0.5, above=0, at_most=1)
    """Share of a GPU's memory for vLLM."""
    max_requests: int = number(256, at_least=1)
    """Responses generated at a time by one engine."""
    kv_cache_gib: float | None = number(None, above=0)
    """Memory of keys and values with vllm_cpu, GiB; null for up to a quarter of what is free."""
    workers: int | None = number(None, at_least=1)
    """Processes that play episodes; null chooses by GPUs, episodes and cores."""
    tries: int = number(3, at_least=1)
    """Tries of an episode that a fault cuts short, before it is left out of the loss."""
    staleness: int = number(0, at_least=0)
    """Steps that episodes start ahead of their own, and so versions that their weights may be old."""
    agent: str | None = None
    """Program that plays instead of the built-in loop: FILE.py:FUNCTION or MODULE:FUNCTION."""
    agent_timeout: float = number(3600.0, above=0)
    """Time limit of an episode of such a program in seconds."""
    correction: RolloutCorrection = field(default_factory=RolloutCorrection)
    """Correction for differences in log-probs of rollout engine and trainer."""


@dataclass(frozen=True, config=STRICT)
class TrainSettings(Record, path="train"):
    """Sizes of the training; a step plays batch_size x group_size episodes."""

    steps: int = number(200, at_least=1)
    """Steps of the training."""
    batch_size: int = number(32, at_least=1)
    """Tasks of a step."""
    mini_batch_size: int = number(8, at_least=1)
    """Tasks of an optimiser step: times rollout.group_size, the rows of one."""
    epochs: int = number(1, at_least=1)
    """Passes over the rows of a step."""
    max_tasks: int | None = number(None, at_least=1)
    """Tasks of the split to train on, each subtask in its share; null for all."""
    tokens_per_gpu: int = number(16384, at_least=1)
    """Most tokens of a micro-batch on a GPU or CPU rank; lowered by free memory unless you set it."""
    log_prob_tokens_per_gpu: int | None = number(None, at_least=1)
    """The same where log-probs are computed without gradients; null for tokens_per_gpu."""
    pad_tokens_to: int | None = number(None, at_least=1)
    """Multiple of tokens to which micro-batches are padded; null for none, which bfloat16 on a CPU changes."""


@dataclass(frozen=True, config=STRICT)
class OptimizerSettings(Record, path="optimizer"):
    """AdamW of the policy."""

    lr: float = number(1e-6, at_least=0)
    """Highest learning rate."""
    warmup_steps: int = number(0, at_least=0)
    """Training steps in which the learning rate rises, from 0 in the first one."""
    schedule: Schedule = Schedule.CONSTANT
    """Learning rate after these: constant or cosine."""
    min_lr_ratio: float | None = number(None, at_least=0, at_most=1)
    """Share of lr at the end of a cosine; null for 0."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the running means of gradient and squared gradient, each from 0 to below 1."""
    weight_decay: float = number(0.01, at_least=0)
    """Decoupled weight decay."""
    clip_grad: float = number(1.0, above=0)
    """Largest norm of the gradient."""

    def check(self) -> None:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise SettingsError(f"optimizer.betas must be two numbers from 0 to below 1, not {list(self.betas)}")


@dataclass(frozen=True, config=STRICT)
class ValidationSettings(Record, path="validation"):
    """Episodes that measure the policy."""

    every: int | None = number(10, at_least=1)
    """Steps between validations; null for none."""
    at_start: bool = True
    """Whether to validate before the first step, too."""
    only: bool = False
    """Whether to validate and stop."""
    tasks: int | None = number(128, at_least=1)
    """Tasks of a validation, always the same, each subtask in its share; null for all."""
    samples: int = number(1, at_least=1)
    """Episodes of each task."""
    temperature: float = number(0.4, at_least=0)
    """Sampling temperature; 0 takes the most likely token."""
    top_p: float = number(1.0, above=0, at_most=1)
    """Probability mass of the tokens sampled from."""
    top_k: int = number(-1, at_least=-1)
    """Number of the tokens sampled from; -1 for all."""
    keep_best: str | None = "success/all"
    """Metric whose best checkpoint is kept as checkpoints/best; null for none."""
    record: int = number(0, at_least=0)
    """Episodes of each validation kept for `spear view`."""


@dataclass(frozen=True, config=STRICT)
class CheckpointSettings(Record, path="checkpoint"):
    """Checkpoints: what is saved, and how a run resumes."""

    every: int | None = number(10, at_least=1)
    """Steps between checkpoints; null for none."""
    keep: int = number(2, at_least=1)
    """Newest checkpoints that are kept."""
    store: str | None = None
    """Address to which checkpoints are uploaded, too: s3://BUCKET/RUN, or another of fsspec."""
    resume: Resume = Resume.EXACT
    """exact refuses to resume with other settings, code or data; changed allows it."""


@dataclass(frozen=True, config=STRICT)
class ClusterSettings(Record, path="cluster"):
    """Machines and how the model is spread over them."""

    device: Device = Device.CPU
    """cpu or cuda."""
    nodes: int = number(1, at_least=1)
    """Machines."""
    gpus_per_node: int | None = number(1, at_least=1)
    """GPUs of each machine that are used; on CPUs, ranks. null is one GPU, or ranks by cores and the policy's size."""
    strategy: Strategy = Strategy.FSDP2
    """How the model is sharded: fsdp2 or fsdp."""
    shard_size: int = number(-1, at_least=-1)
    """GPUs that share the weights, which are copied across such groups; -1 for all."""
    sequence_parallel: int = number(1, at_least=1)
    """GPUs that share a row (Ulysses)."""
    offload: bool = False
    """Whether weights and optimiser wait in host memory between updates."""
    memory_saving: bool = False
    """Whether they stay there during updates, too (fsdp2's offload_policy), which is slower."""

    def check(self) -> None:
        if self.shard_size == 0:
            raise SettingsError("cluster.shard_size must be -1 (all GPUs) or a whole number from 1, not 0")


LOGGERS = {
    **{"console": None, "file": None, "tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"},
    **{"swanlab": "swanlab", "clearml": "clearml", "trackio": "trackio", "rl_insight": "rl_insight"},
    "vemlp_wandb": "volcengine_ml_platform",
}
"""verl's loggers, and the module that each needs."""


@dataclass(frozen=True, config=STRICT)
class LogSettings(Record, path="log"):
    """Where metrics go."""

    to: tuple[str, ...] = ("console", "tensorboard", "file")
    """verl's loggers: console, file, tensorboard, wandb, mlflow, swanlab, ..."""
    project: str = "spear"
    """Project of a logging service."""
    run: str = "run"
    """Name of the run there."""

    def check(self) -> None:
        if unknown := next((name for name in self.to if name not in LOGGERS), None):
            raise SettingsError(f"log.to={unknown!r} is not a logger: take some of {', '.join(LOGGERS)}")


@dataclass(frozen=True, config=STRICT)
class RecordSettings(Record, path="record"):
    """Episodes of the training that are kept for `spear view`."""

    every: int = number(10, at_least=1)
    """Steps from one with kept episodes to the next, the first being step 1."""
    episodes: int = number(4, at_least=0)
    """Kept episodes of such a step; 0 keeps none."""

    def count(self, step: int) -> int:
        """Number of episodes kept of a step (from 1)."""
        return self.episodes if (step - 1) % self.every == 0 else 0


@dataclass(frozen=True, config=STRICT)
class RunConfig(Record):
    """Configuration of a training."""

    model: ModelSettings = field(default_factory=ModelSettings)
    env: EnvironmentSettings = field(default_factory=EnvironmentSettings)
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    advantage: AdvantageSettings = field(default_factory=AdvantageSettings)
    reward: RewardSettings = field(default_factory=RewardSettings)
    sil: SilSettings = field(default_factory=SilSettings)
    replay: ReplaySettings = field(default_factory=ReplaySettings)
    baseline: BaselineSettings = field(default_factory=BaselineSettings)
    cov: CovarianceSettings = field(default_factory=CovarianceSettings)
    clip: ClipSettings = field(default_factory=ClipSettings)
    kl: KlSettings = field(default_factory=KlSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    filter: FilterSettings = field(default_factory=FilterSettings)
    critic: CriticSettings = field(default_factory=CriticSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    curriculum: CurriculumSettings = field(default_factory=CurriculumSettings)
    branch: BranchSettings = field(default_factory=BranchSettings)
    validation: ValidationSettings = field(default_factory=ValidationSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    log: LogSettings = field(default_factory=LogSettings)
    record: RecordSettings = field(default_factory=RecordSettings)
    seed: int = number(0, at_least=0, at_most=2**63 - 1)
    """Seed of everything random."""  # torch takes 64 bits with a sign
    deterministic: bool = True
    """Whether requests are batched in a canonical order, so that the same seed gives the same run on a CPU."""
    verl: Mapping[str, Any] = Field(default_factory=dict)
    """Keys passed on to verl unchanged, after all of ours: verl.actor_rollout_ref.actor.fsdp_config.seed=1"""

    @property
    def algorithm(self) -> SpearSettings:
        """The nodes that the algorithm reads."""
        return SpearSettings(**{item.name: getattr(self, item.name) for item in fields(SpearSettings)})

    @property
    def ranks(self) -> int:
        """Processes that train."""
        return self.cluster.nodes * (self.cluster.gpus_per_node or 1)

    @property
    def on_cpu(self) -> bool:
        """Whether the training computes on CPUs."""
        return self.cluster.device is Device.CPU

    @property
    def longest_row(self) -> int:
        """Tokens of the longest row."""
        return self.rollout.max_prompt_length + self.rollout.max_response_length

    @property
    def repeats(self) -> bool:
        """Whether batches have a canonical order, which agent programs and asynchronous weight updates prevent."""
        return self.deterministic and self.rollout.agent is None and self.rollout.staleness == 0

    def change(self, node: str, **values: Any) -> RunConfig:
        """Return a copy with other values in one of its nodes."""
        return replace(self, **{node: replace(getattr(self, node), **values)})

    def _check_device(self) -> None:
        rollout = self.rollout
        if self.on_cpu and rollout.engine is RolloutEngine.VLLM:
            raise SettingsError("rollout.engine=vllm does not run on a CPU: choose transformers or vllm_cpu")
        if not self.on_cpu and rollout.engine is RolloutEngine.VLLM_CPU:
            raise SettingsError("rollout.engine=vllm_cpu is for a CPU: on cuda choose vllm")
        if self.on_cpu and rollout.dtype is RolloutType.FLOAT16:
            raise SettingsError("rollout.dtype=float16 is for a GPU: on a CPU take auto, float32 or bfloat16")
        if rollout.staleness and not self.on_cpu:
            raise SettingsError(f"rollout.staleness={rollout.staleness} has no device of its own on cuda: set it to 0")
        if self.cluster.memory_saving and self.on_cpu:
            raise SettingsError("cluster.memory_saving=true is for GPUs: on a CPU set it to false")

    def _check_groups(self) -> None:
        """Raise SettingsError where the only episode of a group would be compared with others."""
        advantage = self.advantage
        of_others = advantage.estimator in ("grpo", "rloo", "stepwise") and advantage.singleton is Singleton.ZERO
        for setting, compares in (
            (f"advantage.estimator={advantage.estimator} and advantage.singleton=zero", of_others),
            ("curriculum.choice=thompson", self.curriculum.choice is Choice.THOMPSON),
            ("sampling.enabled=true", self.sampling.enabled),
        ):
            if compares and self.rollout.group_size == 1:
                raise SettingsError(f"rollout.group_size=1 leaves {setting} nothing to compare: set at least 2")

    def check_together(self) -> None:
        """Raise SettingsError for values that contradict each other; single ones are checked when they are set."""
        rollout, cluster = self.rollout, self.cluster
        if self.loss.aggregation is Aggregation.SUM_NORM:
            raise SettingsError("loss.aggregation=sum-norm depends on the micro-batch: take seq-mean-token-sum-norm")
        self._check_device()
        self._check_groups()
        if rollout.agent is not None and self.env.layout is not Layout.CONVERSATION:
            raise SettingsError("an agent leaves conversations: set env.layout=conversation with rollout.agent")
        for key, size in (
            ("rollout.tensor_parallel", rollout.tensor_parallel),
            ("cluster.sequence_parallel", cluster.sequence_parallel),
            ("cluster.shard_size", cluster.shard_size if 0 < cluster.shard_size < self.ranks else 1),
        ):
            if self.ranks % size:
                raise SettingsError(f"{key}={size} does not divide the {self.ranks} ranks of the cluster")
        for key, tokens in (
            ("train.tokens_per_gpu", self.train.tokens_per_gpu),
            ("train.log_prob_tokens_per_gpu", self.train.log_prob_tokens_per_gpu),
        ):
            if tokens is not None and tokens * cluster.sequence_parallel < self.longest_row:
                least = -(-self.longest_row // cluster.sequence_parallel)
                raise SettingsError(f"a row has up to {self.longest_row} tokens: raise {key}={tokens} to {least}")
        if rollout.engine is RolloutEngine.VLLM_CPU:
            for key, temperature in (("rollout", rollout.temperature), ("validation", self.validation.temperature)):
                if 0 < temperature < 0.01:
                    raise SettingsError(f"{key}.temperature={temperature}: vLLM samples at 0 or from 0.01")


def flatten(node: Any, prefix: str = "", *, keep_nodes: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings by dotted key; ``keep_nodes``: the mappings, too."""
    if isinstance(node, Mapping) and (node or not prefix):
        if keep_nodes and prefix:
            yield prefix, node
        for key, value in node.items():
            yield from flatten(value, f"{prefix}.{key}" if prefix else str(key), keep_nodes=keep_nodes)
    else:
        yield prefix, node
