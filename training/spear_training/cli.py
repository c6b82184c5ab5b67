"""``spear train`` and ``spear demo``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from spear_agents.play.trajectory import Layout
from spear_envs.cli import read_keywords
from spear_envs.completion import ENV, SPLIT
from spear_envs.core.errors import SpearError
from spear_sandbox.console import FilePath, Number, echo
from spear_sandbox.terminal import Console, Progress


class Word(click.ParamType):
    """``GROUP=CHOICE``, ``FILE.yaml`` or ``KEY=VALUE``; groups, choices and keys are completed."""

    name = "word"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
        """Complete groups and keys up to the equals sign, then the choices of a group."""
        from spear_training.run.compose import GROUPS, OFFICIAL, list_choices, list_official
        from spear_training.run.config import RunConfig

        group, equals, begun = incomplete.partition("=")
        if not equals:
            names = [*GROUPS, *RunConfig.keys()]
            return [CompletionItem(f"{name}=") for name in names if name.startswith(group)]
        if group not in GROUPS:
            return []
        choices = list_choices(group)
        if group == "preset" and begun.startswith(OFFICIAL[:1]):  # twice as many, so only on request
            choices |= {name: choices[name.rpartition("/")[2]] for name in list_official()}
        return [
            CompletionItem(f"{group}={choice}", help=title)
            for choice, title in choices.items()
            if choice.startswith(begun)
        ]


WORD = Word()
SEED = click.IntRange(0, 2**63 - 1)
"""A seed, as the setting of that name: torch takes 64 bits with a sign."""


class TrainCommand(click.Command):
    """``spear train``, whose help lists the nodes of a configuration."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the nodes with their meanings."""
        from spear_training.catalogue import describe_groups

        with formatter.section("Settings (--describe NODE lists those of one)"):
            formatter.write_dl(list(describe_groups()))


@click.command("train", cls=TrainCommand, context_settings={"ignore_unknown_options": True})
@click.option("--out", type=FilePath(), help="Run folder: checkpoints, metrics, curves, log.")
@click.option("--list", "list_only", is_flag=True, help="Print the choices of each group and stop.")
@click.option("--describe", metavar="NODE", help="Print the settings of a node, or of all, and stop.")
@click.option("--schema", is_flag=True, help="Print the JSON schema of a file and stop.")
@click.option("--print-config", is_flag=True, help="Print the configuration and stop.")
@click.option("--print-verl", is_flag=True, help="Print what verl gets of it and stop.")
@click.argument("words", nargs=-1, metavar="[GROUP=CHOICE]... [FILE.yaml]... [KEY=VALUE]...", type=WORD)
def train(
    out: Path | None,
    list_only: bool,
    describe: str | None,
    schema: bool,
    print_config: bool,
    print_verl: bool,
    words: tuple[str, ...],
) -> None:
    """Train a policy with SPEAR or another algorithm, through verl.

    Groups are preset (an experiment), algorithm, model, cluster and environment. A file of YAML has settings of your
    own, and KEY=VALUE changes one:

    \b
      spear train preset=demo model.path=runs/demo/warmstart seed=1 --out runs/first
      spear train preset=alfworld_qwen2.5_7b algorithm=grpo cluster=8gpu --out runs/grpo
      spear train preset=alfworld_qwen2.5_7b model=tiny --out runs/dry     # two real steps on a CPU
      spear train mine.yaml optimizer.lr=2e-6 --out runs/mine

    The same command resumes a stopped run. verl.KEY=VALUE passes a key on to verl.
    """
    _refuse_options(words)
    if list_only:
        _print_choices()
    elif describe is not None:
        _print_fields(describe)
    elif schema:
        from spear_training.catalogue import make_schema

        echo(json.dumps(make_schema(), indent=1))
    elif print_config or print_verl:
        _print_composed(words, out or Path("runs/run"), verl=print_verl)
    elif out is None:
        raise click.UsageError("name a run folder: --out runs/NAME")
    else:
        from spear_training.run.compose import compose
        from spear_training.run.to_verl import check_keys

        config = compose(words).config  # wrong words are answered before torch is imported, which takes seconds
        config.check_together()
        check_keys(config)
        from spear_training.run.training import run_training

        run_training(words, out, Console())


def _refuse_options(words: Sequence[str]) -> None:
    """Raise click.NoSuchOption for an unknown option among words."""
    if unknown := next((word for word in words if word.startswith("-")), None):
        raise click.NoSuchOption(unknown.partition("=")[0], ctx=click.get_current_context())


def _print_choices() -> None:
    from spear_training.run.compose import GROUPS, list_choices

    console = Console()
    for group in GROUPS:
        console.print(group, style="bold", highlight=False)
        for name, title in list_choices(group).items():
            console.print(Text.assemble(f"  {name:24} ", (title, "dim")), soft_wrap=True)
    console.print("A preset of the paper with the values of the authors' code: preset=official/NAME")


def _print_fields(node: str) -> None:
    from spear_training.catalogue import describe_fields

    found = [fact for fact in describe_fields() if node == "all" or f"{fact.key}.".startswith(f"{node}.")]
    if not found:
        names = dict.fromkeys(fact.key.partition(".")[0] for fact in describe_fields())
        raise SpearError(f"there is no node {node!r}: take all, or {', '.join(names)}")
    console = Console()
    for fact in found:
        facts = f" = {json.dumps(fact.default)}  ({fact.kind})"
        console.print(Text.assemble((fact.key, "bold"), facts), soft_wrap=True)
        console.print(Padding(Text(fact.meaning, "dim"), (0, 0, 0, 4)))


def _print_composed(words: Sequence[str], out: Path, *, verl: bool) -> None:
    from omegaconf import OmegaConf

    from spear_training.run.compose import compose
    from spear_training.run.launch import resolve_workers
    from spear_training.run.to_verl import to_verl

    config = compose(words).config
    made = to_verl(resolve_workers(config), out) if verl else OmegaConf.create(config.to_mapping())
    echo(OmegaConf.to_yaml(made))


@click.command("demo")
@click.option("--out", type=FilePath(), help="Folder; by default runs/demo, or runs/demo-quick.")
@click.option("--quick", is_flag=True, help="Do everything with less of it; nothing is learnt.")
@click.option(
    "--steps",
    type=click.IntRange(1),
    envvar="SPEAR_DEMO_STEPS",
    help="Training steps; by default 60, or 4 with --quick.",
)
@click.option("--seed", type=SEED, default=0, help="Seed of the training.")
def demo(out: Path | None, quick: bool, steps: int | None, seed: int) -> None:
    """Train a small agent on Sokoban from start to finish, on a CPU, without a download.

    Warm start from a noisy expert, SPEAR training through verl, evaluation before and after on the test panel, curves
    and an animated level. The same command resumes it. With --quick, everything runs but nothing is learnt.

    \b
      spear demo
      spear demo --quick
      spear demo --steps 2 --out runs/trial
    """
    from spear_training.demo import FULL, QUICK, run_demo

    out = out or Path("runs/demo-quick" if quick else "runs/demo")
    run_demo(out, size=QUICK if quick else FULL, steps=steps, seed=seed, console=Console())


_FILE = FilePath()


@click.command("sft", context_settings={"ignore_unknown_options": True})
@click.option("--model", type=_FILE, required=True, help="Folder or name of a causal language model (spear models).")
@click.option("--data", type=_FILE, required=True, multiple=True, help="File of samples, or retool-sft; repeatable.")
@click.option("--out", type=_FILE, required=True, help="Run folder: checkpoints, metrics, log; the result in model/.")
@click.option("--preset", type=click.Choice(["retool"]), help="Settings of the authors' cold start on ReTool-SFT.")
@click.option("--epochs", type=click.IntRange(1), help="Passes over the samples; by default 1, or the preset's.")
@click.option("--batch", type=click.IntRange(1), help="Samples of an optimiser step; by default 32.")
@click.option("--learning-rate", type=Number(0, min_open=True), help="Its highest value; by default 1e-5.")
@click.option("--max-length", type=click.IntRange(2), help="Longest sample in tokens; by default 16,384.")
@click.option(
    "--overlong", type=click.Choice(["drop", "truncate"]), default="drop", help="What happens to longer ones."
)
@click.option("--keep-lost", is_flag=True, help="Learn from lost episodes too.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto")
@click.option("--seed", type=SEED, default=0, help="Seed of the order of the samples.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16"]),
    default="auto",
    help="Precision on a CPU: by default bfloat16 if it is faster and the model is not tiny, else float32.",
)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
def sft(out: Path, data: tuple[Path, ...], overlong: str, device: str, **options: Any) -> None:
    """Fine-tune a model on episodes or other conversations, through verl: the cold start before `spear train`.

    Data are files of `spear collect`, other .jsonl or .parquet files with messages, or retool-sft, which `spear data
    get code` fetches. The loss falls on the policy's tokens alone: on the recorded ids where the data has them, else
    on what the model's chat template makes of the responses. KEY=VALUE changes any key of verl's supervised trainer:

    \b
      spear sft --model DIR --data alfworld.jsonl --out runs/sft trainer.n_gpus_per_node=8
      spear sft --model Qwen/Qwen3-32B --data retool-sft --preset retool --out runs/cold trainer.n_gpus_per_node=8

    The same command resumes a run that was stopped.
    """
    from spear_agents.model_files import resolve_model

    _refuse_options(options["overrides"])
    console = Console()
    options["model"] = Path(resolve_model(str(options["model"]), console))
    for path in data:
        if path.suffix and not path.is_file():
            raise SpearError(f"{path} is not a file: --data takes .jsonl and .parquet files")
    import torch

    from spear_training.sft.launch import SftSettings, run_sft
    from spear_training.sft.samples import Overlong

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model = run_sft(SftSettings(data=data, overlong=Overlong(overlong), device=device, **options), out, console)
    console.print(f"model: {model}", soft_wrap=True)


@click.command("warmstart")
@click.argument("env_id", metavar="ENV", type=ENV)
@click.option("--out", type=FilePath(), required=True, help="New Hugging Face folder.")
@click.option("--env", "env_keywords", multiple=True, metavar="KEY=VALUE", help="Keyword of the environment.")
@click.option("--template", help="Prompt template of the environment.")
@click.option("--layout", type=click.Choice([x.value for x in Layout]), help="One row per turn, or per conversation.")
@click.option("--history", type=click.IntRange(0), help="Earlier turns shown in per_turn prompts.")
@click.option("--episodes", type=int, help="Expert episodes.")
@click.option("--noise", type=Number(0, 1), help="Share of the expert's turns that are errors.")
@click.option("--inadmissible", type=Number(0, 1), help="Share of its errors without effect.")
@click.option(
    "--answers",
    type=click.Choice(["played", "expert"]),
    help="Learn what was played in won episodes, or what the expert would do in every state.",
)
@click.option("--epochs", type=int, help="Passes over the rows.")
@click.option("--batch", type=int, help="Rows of an optimiser step.")
@click.option("--learning-rate", type=Number(0, min_open=True), help="Highest learning rate.")
@click.option("--hidden", type=int, help="Width of the model.")
@click.option("--layers", type=int, help="Depth of the model.")
@click.option("--heads", type=int, help="Attention heads of a layer.")
@click.option("--mlp", type=int, help="Width of the feed-forward part.")
@click.option("--valid-split", type=SPLIT, help="Split on which the result is measured.")
@click.option("--panel-tasks", type=int, help="Number of its leading tasks to play; 0 for none.")
@click.option("--target", type=Number(0, 1), help="Continue training below this success on them.")
@click.option("--seed", type=SEED, default=0)
@click.option("--threads", type=click.IntRange(1), default=1, help="Compute threads.")
@click.option("--overwrite", is_flag=True, help="Replace the folder if it exists.")
def warmstart(
    env_id: str, out: Path, env_keywords: tuple[str, ...], threads: int, overwrite: bool, **given: Any
) -> None:
    """Make a tiny policy for ENV from the episodes of a noisy expert.

    The result, a Qwen3 model of the given size and its tokenizer, loads in transformers, verl and vLLM like any other.
    Defaults are those of the environment's recipe (training/spear_training/warmstart/policy.py), from which
    `spear train preset=demo`, `alfworld_tiny`, `code_tiny`, `search_tiny` or `webshop_tiny` continues.

    \b
      spear warmstart spear/Sokoban-v1 --out runs/warmstart
    """
    from spear_training.warmstart import Answers, choose_recipe, train_policy  # imports torch and transformers

    recipe = choose_recipe(env_id)
    chosen = {name: value for name, value in given.items() if value is not None}
    shape = {name: chosen.pop(name) for name in ("hidden", "layers", "heads", "mlp") if name in chosen}
    for name, kind in (("layout", Layout), ("answers", Answers)):
        if name in chosen:
            chosen[name] = kind(chosen[name])
    settings = replace(
        recipe,
        env_kwargs={**recipe.env_kwargs, **read_keywords(env_keywords)},
        shape=replace(recipe.shape, **shape),
        **chosen,
    )
    console, text = Console(), TextColumn("{task.description}")
    columns = (text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("expert episodes", total=settings.episodes)
        report = train_policy(
            settings,
            out,
            threads=threads,
            overwrite=overwrite,
            observer=lambda stage, done, total: progress.update(bar, description=stage, completed=done, total=total),
        )
    console.print(
        f"{report.parameters:,} parameters, {report.vocabulary} tokens; {report.rows:,} rows, {report.steps} steps, "
        f"loss {report.loss:.3f}; CPU {report.collect_cpu_s:.0f} s for episodes, {report.train_cpu_s:.0f} s to train",
        soft_wrap=True,
    )
    if report.valid is not None and report.valid.success is not None:
        success = report.valid.success
        console.print(
            f"valid panel at temperature 1: {100 * success.mean:.1f} % won "
            f"(CI95 {100 * success.low:.1f} to {100 * success.high:.1f}, {success.tasks} tasks), "
            f"score {100 * report.valid.score:.1f}, "
            f"{100 * report.valid.format_ok:.2f} % of the turns well-formed, "
            f"{100 * report.valid.action_ok:.1f} % valid actions",
            soft_wrap=True,
        )
    console.print(f"policy: {out}", soft_wrap=True)


@click.command("export")
@click.argument("run", type=FilePath(exists=True, file_okay=False))
@click.option("--out", type=FilePath(), required=True, help="New Hugging Face folder.")
@click.option("--step", type=click.IntRange(1), help="Step of the checkpoint; the latest by default.")
@click.option("--best", is_flag=True, help="The checkpoint that was best on the validation panel.")
def export(run: Path, out: Path, step: int | None, best: bool) -> None:
    """Write the policy of RUN as a folder that transformers, vLLM and `spear eval --model` load.

    Weights are in safetensors; shards of several ranks are joined.

    \b
      spear export runs/alfworld --out runs/alfworld/model
    """
    from spear_training.run.store import export_policy

    if best and step is not None:
        raise click.UsageError("give --step or --best, not both")
    made = export_policy(run, out, step=step, best=best)
    about = ", ".join(made.dtypes) + (f", computes in {made.dtype}" if made.dtype else "")
    echo(f"policy of step {made.step}: {made.folder} ({made.parameters:,} parameters, {about})")
