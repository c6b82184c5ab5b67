"""What the page shows of one episode: its texts, tokens and pictures as plain data."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import load_env_creator

from spear_agents.engines.base import ChatByteTokenizer, Decoder
from spear_agents.engines.openai import encode_picture
from spear_agents.evaluation.baselines import Method
from spear_agents.play.trajectory import TokenKind, Trajectory, Turn
from spear_agents.viewer.gif import replay_frames
from spear_envs.core.errors import SpearError
from spear_envs.core.making import require_harmless
from spear_envs.core.parsing import mend_text
from spear_envs.data.files import read_regular

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


def open_measure(settings: Mapping[str, Any], folder: Path, chosen: Path | None = None) -> Callable[[str], int] | None:
    """Return what counts the tokens of a text as in a local model's run; None for others, or without its tokenizer."""
    if settings.get("engine") not in ("hf", "vllm"):
        return None
    try:
        return open_decoder(settings, folder, chosen).count
    except SpearError:
        return None


def open_decoder(settings: Mapping[str, Any], folder: Path, chosen: Path | None = None) -> GuardedTokenizer:
    """Return the decoder of a model's tokens: of the folder ``chosen``, or else of ``settings["model"]``.

    A relative path is also resolved in the evaluation's ``folder`` and those above it. Raises SpearError if the
    tokenizer is missing or cannot be read.
    """
    wanted = chosen or settings.get("model")
    if not wanted:
        raise SpearError("the tokenizer of these tokens is unknown: give --tokenizer DIR")
    for place in (Path(), folder, *folder.resolve().parents):
        path = place / str(wanted) / "tokenizer.json"
        if os.path.isfile(path):  # unlike Path.is_file, False for a name that is too long
            return _read_tokenizer(path)
    raise SpearError(f"{wanted} does not contain tokenizer.json: give --tokenizer DIR")


def _read_tokenizer(path: Path) -> GuardedTokenizer:
    try:
        from tokenizers import Tokenizer

        with _no_panic():
            tokenizer = Tokenizer.from_buffer(read_regular(path))
        tokenizer.no_truncation()
        return GuardedTokenizer(tokenizer)
    except ImportError as error:
        raise SpearError("the package tokenizers is not installed: pip install 'spear-agents[hf]' brings it") from error
    except Exception as error:  # what tokenizers raises for a broken file is a plain Exception
        raise SpearError(f"{path} is not a tokenizer: {error}") from error


class GuardedTokenizer:
    """A tokenizer of a file that a stranger wrote: a panic becomes a ValueError."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def count(self, text: str) -> int:
        """Return the number of a text's tokens, without special tokens added."""
        with _no_panic():
            return len(self._tokenizer.encode(mend_text(text), add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""
        with _no_panic():
            text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
            return text


@contextmanager
def _no_panic() -> Iterator[None]:
    """Raise ValueError for a panic of Rust code, which is not an Exception."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"the tokenizer failed: {error}") from error


def split_text(decoder: Decoder, token_ids: Sequence[int]) -> list[tuple[str, int]]:
    """Split the text of ``token_ids`` into pieces, each with its number of tokens.

    Tokens that form one character together (bytes of an emoji) make one piece. Each piece is decoded after the piece
    before it, since many tokenizers write a token differently at the beginning of a text.
    """
    pieces: list[tuple[str, int]] = []
    before, start = 0, 0
    for end in range(1, len(token_ids) + 1):
        known = _decode(decoder, token_ids[before:start])
        text = _decode(decoder, token_ids[before:end])
        if text.endswith(_UNFINISHED) and end < len(token_ids) and end - start < 8:
            continue
        pieces.append((text[len(known) :], end - start))
        before, start = start, end
    return pieces


def _decode(decoder: Decoder, token_ids: Sequence[int]) -> str:
    return decoder.decode(list(token_ids), skip_special_tokens=False)


_TEXT = ChatByteTokenizer()
_ROLE = re.compile("\ufdd0(system|user|assistant)\ufdd1")  # how ChatByteTokenizer writes the beginning of a message
_THOUGHT = re.compile(r"\s*<think>(.*?)(?:</think>|\Z)\s*", re.DOTALL)


def describe_episode(
    trajectory: Trajectory, settings: Mapping[str, Any], open_model: Callable[[], Decoder], *, trust: bool = False
) -> dict[str, Any]:
    """Describe an episode for the page, without NaN and infinities, which JSON does not have.

    Missing parts (a moved tokenizer, a picture of another version's level) are None, and ``notes`` explain why. Of the
    evaluation's ``settings``, ``env_kwargs`` and ``split`` are used. ``open_model`` returns the decoder of the model's
    tokens, and raises SpearError if there is none. With ``trust`` the environment that draws pictures may read what the
    settings name, see :func:`~spear_envs.core.making.require_harmless`.
    """
    notes: list[str] = []
    pictures = _draw(trajectory, settings, notes, trust)
    is_text = trajectory.tokens is TokenKind.BYTES
    model: Decoder | None = None
    if not is_text or any(turn.served and turn.served.token_ids for turn in trajectory.turns):
        try:
            model = open_model()
            if not _fits(model, trajectory.turns):
                raise SpearError("this tokenizer does not give the recorded texts: give --tokenizer DIR")
        except SpearError as error:
            model = None
            notes.append(f"No {'token colours' if is_text else 'prompts and tokens'}: {error}")
    prompts = _TEXT if is_text else model
    copied = ("subtask", "instruction", "fingerprint", "tool_calls", "fault", "trial", "step", "reflection", "detail")
    return {
        **{name: getattr(trajectory, name) for name in (*copied, "final_observation")},
        "env": trajectory.env_id,
        "task": trajectory.task_id,
        "layout": trajectory.layout.value,
        "reward_terms": {str(name): finite(value) for name, value in trajectory.reward_terms.items()},
        "reward": finite(trajectory.reward),
        "score": finite(trajectory.score),
        "won": bool(trajectory.won),
        "stop": trajectory.stop.value,
        "seconds": finite(trajectory.seconds),
        "seed": str(trajectory.seed),  # JavaScript would round a training's seeds
        "memory": list(trajectory.memory),
        "turns": [
            _describe_turn(turn, prompts, model, pictures[i] if pictures else None) | _count(turn, is_text)
            for i, turn in enumerate(trajectory.turns)
        ],
        "criteria": [criterion._asdict() for criterion in trajectory.criteria],
        "final_image": pictures[-1] if pictures else None,
        "notes": notes,
    }


def describe_response(response: str) -> dict[str, str]:
    """Split a response into ``thought`` and the rest, ``said``."""
    found = _THOUGHT.match(response)
    if found is None:
        return {"thought": "", "said": response}
    return {"thought": found[1].strip(), "said": response[found.end() :]}


def finite(value: Any) -> float | None:
    """Return a number that JSON can hold, or None."""
    if not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        return None
    return number if math.isfinite(number) else None


def _describe_turn(turn: Turn, prompts: Decoder | None, model: Decoder | None, picture: str | None) -> dict[str, Any]:
    prompt = None
    if prompts is not None:
        text = prompts.decode(list(turn.prompt_ids), skip_special_tokens=False)
        prompt = _ROLE.sub(r"\n[\1]\n", text).strip("\n")
    return {
        "observation": turn.observation,
        "image": picture,
        "prompt": prompt,
        **describe_response(turn.response),
        "tokens": None if model is None else _colour(model, *_sampled(turn)),
        "action": turn.action,
        "format_ok": turn.format_ok,
        "action_ok": turn.action_ok,
        "anchor": turn.anchor,
        "reward": finite(turn.reward),
        "finish": turn.finish.value,
        "dropped": turn.dropped_turns,
        "seconds": finite(turn.seconds),
    }


def _count(turn: Turn, is_text: bool) -> dict[str, Any]:
    """Return the lengths of prompt and response in a server's tokens where it counted them, else in recorded ids."""
    served = turn.served
    if served is not None and served.prompt_tokens is not None and served.completion_tokens is not None:
        counts, unit = (served.prompt_tokens, served.completion_tokens), "tokens"
    else:
        counts, unit = (len(turn.prompt_ids), len(turn.response_ids)), "bytes" if is_text else "tokens"
    return {"prompt_tokens": counts[0], "response_tokens": counts[1], "unit": unit}


def _sampled(turn: Turn) -> tuple[Sequence[int], Sequence[float]]:
    """Return the model's tokens and their log-probabilities, where known."""
    if turn.served is None:
        return turn.response_ids, turn.log_probs
    return turn.served.token_ids or (), turn.served.log_probs or ()


def _colour(decoder: Decoder, token_ids: Sequence[int], log_probs: Sequence[float]) -> list[Any] | None:
    """Return the pieces of the response with their log-probabilities; None if these are not known."""
    if not log_probs or len(log_probs) != len(token_ids):
        return None
    coloured = []
    start = 0
    for text, count in split_text(decoder, token_ids):
        total = finite(sum(log_probs[start : start + count]))
        coloured.append((text, None if total is None else round(total, 4)))
        start += count
    return coloured


def _join(text: str) -> str:
    """Return a text without blanks and marks of thoughts, which a server sets anew where it sends thoughts apart."""
    return re.sub(r"\s|< ?/?think>", "", text)


def _fits(decoder: Decoder, turns: Sequence[Turn]) -> bool:
    """Return whether a decoder gives the recorded texts; all ids have to be of its vocabulary."""
    try:
        return all(
            _join(decoder.decode(list(ids), skip_special_tokens=False)).startswith(_join(turn.response))
            for turn in turns
            if (ids := _sampled(turn)[0])
        )
    except (ValueError, OverflowError, TypeError):
        return False


def _draw(trajectory: Trajectory, settings: Mapping[str, Any], notes: list[str], trust: bool) -> list[str]:
    """Return data URLs of pictures before each response and after the last; empty if the environment does not draw."""
    if trajectory.began is not None:
        notes.append(
            f"Began before turn {trajectory.began + 1} of an earlier episode, whose responses are not in this record: "
            "no pictures"
        )
        return []
    try:
        # Only registered names count: a file of episodes must not make this process import anything.
        spec = gym.registry.get(trajectory.env_id)
        if spec is None or spec.entry_point is None:
            return []
        creator = load_env_creator(spec.entry_point) if isinstance(spec.entry_point, str) else spec.entry_point
        if not getattr(creator, "draws", False):
            return []
        keywords, split = settings.get("env_kwargs") or {}, settings.get("split")
        if not trust:
            require_harmless(trajectory.env_id, {**keywords, "split": split}, "the run")
        frames = replay_frames(
            trajectory.env_id,
            keywords,
            trajectory,
            split=split,
            method=settings.get("method") or Method.PLAIN,
        )
        return [encode_picture(frame) for frame in frames]
    except Exception as error:  # of an environment given another's responses: show the texts anyway
        notes.append(f"No pictures: {error}")
        return []
