"""The episodes of an evaluation with the policy's prompts and responses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spear_agents.baselines.forms import Method
from spear_agents.collect import Message, SampleMaker
from spear_agents.engines.bytes import ChatByteTokenizer
from spear_agents.records import EPISODES, read_last, read_settings
from spear_agents.replay.tokens import Decoder, open_decoder
from spear_agents.settings import EngineKind, EvalSettings
from spear_agents.trajectory import Layout, StopReason, TokenKind, Trajectory
from spear_envs.core.errors import SpearError
from spear_envs.core.making import make_env, require_harmless
from spear_envs.core.prompts import IMAGE


@dataclass(frozen=True)
class Said:
    """One response and its prompt."""

    prompt: list[Message] | str
    """Messages, or the text of the model's own chat template."""
    response: str


@dataclass
class Recorded:
    """An opened run: its settings, and the last complete episode of each job.

    ``faults`` counts episodes cut short by a fault, ``unrepeatable`` those without messages, since the environment
    answered differently when they were played again.
    """

    settings: dict[str, Any]
    episodes: Sequence[Trajectory]
    faults: int
    unrepeatable: int = 0
    _maker: SampleMaker | None = field(default=None, repr=False)
    _decoder: Decoder | None = field(default=None, repr=False)

    def tell(self, trajectory: Trajectory) -> list[Said] | None:
        """Prompt and response of each turn, in order; None for an unrepeatable episode. Raises SpearError for pictures.

        Each prompt ends where its response begins, also if a program continued from an earlier call than the last
        (``Turn.follows``).
        """
        told: Trajectory | None = trajectory
        if trajectory.tokens is not TokenKind.BYTES and self._maker is not None:
            told = self._maker.retell(trajectory)
        if told is None:
            self.unrepeatable += 1
            return None
        said: list[Said] = []
        whole: list[list[int]] = []
        for turn in told.turns:
            # The record has only the tokens added since the turn it continues.
            before = [] if turn.follows is None else [*whole[turn.follows], *told.turns[turn.follows].response_ids]
            ids = [*before, *turn.prompt_ids]
            whole.append(ids)
            if self._decoder is not None:
                texts = [self._decoder.decode(each, skip_special_tokens=False) for each in (ids, turn.response_ids)]
                said.append(Said(texts[0], texts[1]))
                continue
            messages = [
                {"role": each["role"], "content": mend_text(each["content"])}
                for each in ChatByteTokenizer().read_messages(ids)
            ]
            if any(IMAGE in message["content"] for message in messages if message["role"] != "assistant"):
                raise SpearError(
                    f"{trajectory.env_id} shows pictures, which messages cannot hold: play with --env modality=text"
                )
            said.append(Said(messages, mend_text(turn.response)))
        return said


def mend_text(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode("utf-8")


@contextmanager
def open_recorded(run: Path, tokenizer: Path | None = None, *, trust: bool = False) -> Iterator[Recorded]:
    """Open a folder of ``spear eval --out`` for the duration of the block.

    The records of a server's model or a scripted player hold messages. Those of a local model hold tokens: its episodes
    are played again for their messages. Those of a program, whose messages are lost, are given as the text of the
    model's chat template; ``tokenizer`` is its folder if the one in the settings is gone. ``trust``: the environment
    may run, reach and read what the folder names, see :func:`~spear_envs.core.making.require_harmless`.

    Raises SpearError if the folder is not an evaluation's, it has no complete episode, or its environment cannot be
    made.
    """
    settings = read_settings(run)
    last = read_last(run / EPISODES)
    episodes = [each for each in last if each.stop is not StopReason.FAULT]
    if not episodes:
        raise SpearError(f"{run} does not contain a complete episode: there is nothing to export.")
    found = Recorded(settings, episodes, len(last) - len(episodes))
    if all(each.tokens is TokenKind.BYTES for each in episodes):
        yield found
        return
    if any(each.steps is not None for each in episodes):
        found._decoder = open_decoder(settings, run, tokenizer)
        yield found
        return
    try:
        played = EvalSettings(
            settings["env_id"],
            EngineKind(settings["engine"]),
            settings["model"],
            settings["env_kwargs"],
            settings["split"],
            template=settings["template"],
            template_kwargs=settings["template_kwargs"],
            layout=Layout(settings["layout"]),
            history=settings["history"],
            method=Method(settings["method"]),
        )
    except (KeyError, ValueError) as error:
        raise SpearError(f"{run} was not written by this version of spear eval: its settings lack {error}.") from error
    if not trust:
        require_harmless(played.env_id, {**played.env_kwargs, "split": played.split}, str(run))
    with closing(make_env(played.env_id, played.split or "", played.env_kwargs)) as env:
        found._maker = SampleMaker(env, played)
        yield found
