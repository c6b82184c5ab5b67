"""Preference pairs from won and lost episodes, in the form of ``trl.DPOTrainer``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from spear_agents.exports.recorded import Recorded, Said
from spear_envs.core import canonical_json


def make_pairs(recorded: Recorded, most: int = 4) -> Iterator[dict[str, Any]]:
    """Pairs ``{prompt, chosen, rejected}`` of a won and a lost episode of one task, at most ``most`` of a task.

    A pair is taken where the two episodes diverge: the first response of the won one to a prompt that the lost one
    answered differently. Both responses answer the same prompt and contain no text of the environment. Each is a list
    of messages, or a text if a program played with a local model. Each episode is used once before any is used again.
    """
    by_task: dict[str, tuple[list[list[Said]], list[list[Said]]]] = defaultdict(lambda: ([], []))
    outcomes: dict[str, set[bool]] = defaultdict(set)
    for episode in recorded.episodes:
        outcomes[episode.task_id].add(episode.won)
    for episode in recorded.episodes:
        if len(outcomes[episode.task_id]) == 2 and (said := recorded.tell(episode)) is not None:
            by_task[episode.task_id][not episode.won].append(said)
    first = recorded.episodes[0]
    for task, (won, lost) in by_task.items():
        seen: set[str] = set()
        for shift in range(len(lost)):
            for place, better in enumerate(won):
                pair = _part(better, lost[(place + shift) % len(lost)])
                key = canonical_json(pair) if pair is not None else ""
                if pair is None or key in seen or len(seen) >= most:
                    continue
                seen.add(key)
                yield {**pair, "env_id": first.env_id, "task_id": task, "fingerprint": first.fingerprint}


def _part(won: list[Said], lost: list[Said]) -> dict[str, Any] | None:
    """The pair where two episodes diverge, or None."""
    answers: dict[str, set[str]] = defaultdict(set)
    first: dict[str, str] = {}
    for said in lost:
        key = canonical_json(said.prompt)
        answers[key].add(said.response)
        first.setdefault(key, said.response)
    for said in won:
        key = canonical_json(said.prompt)
        if key not in first or said.response in answers[key]:
            continue
        if isinstance(said.prompt, str):
            return {"prompt": said.prompt, "chosen": said.response, "rejected": first[key]}
        chosen, rejected = ([{"role": "assistant", "content": text}] for text in (said.response, first[key]))
        return {"prompt": said.prompt, "chosen": chosen, "rejected": rejected}
    return None
