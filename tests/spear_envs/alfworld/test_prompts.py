"""What prompts show."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import pytest
import regex

from spear_envs.alfworld.prompts import CompactHouseholdTemplate, HouseholdTemplate
from spear_envs.core.prompts import PromptContext
from tests.spear_envs.alfworld.small import start


def show(observation: str, *history: tuple[str, str], commands: tuple[str, ...] = (), turn: int = 1) -> PromptContext:
    return PromptContext("put a hot apple in fridge.", observation, commands, history, turn, 50)


def test_the_task_stands_in_the_prompt_once() -> None:
    game = start()
    prompt = HouseholdTemplate().render(show(game.opening, commands=game.admissible))
    assert prompt.count("put a hot apple in fridge.") == 1
    assert "-= Welcome" not in prompt
    assert "you see a cabinet 2, a cabinet 1," in prompt
    assert "'go to fridge 1'" in prompt
    assert "'help'" not in prompt
    assert "'look'" in prompt
    assert "<think>" in prompt
    assert "steps" not in prompt.rpartition("Your task")[2]  # no history, no count of steps


def play_noisily(env: Any, episodes: int) -> Iterator[tuple[str, str]]:
    """Prompts and responses of episodes of an expert that errs."""
    template, rng = env.templates["compact"], random.Random(0)
    for seed in range(episodes):
        observation, info = env.reset(seed=seed)
        history: list[tuple[str, str]] = []
        while not env.done:
            context = PromptContext(
                info["instruction"], observation, info["admissible_actions"], history[-2:], info["turn"] + 1, 20
            )
            plan = env.expert_plan()
            command = plan[0] if plan and rng.random() < 0.7 else rng.choice([*info["admissible_actions"], "eat x 1"])
            response = template.respond(command)
            yield template.render(context), response
            history.append((observation, command))
            observation, _, _, _, info = env.step(response)


@pytest.mark.parametrize(("rooms", "most"), [("small", 80), ("standard", 100)])
def test_compact_prompts_are_short_and_names_are_one_token(rooms: str, most: int) -> None:
    pattern = regex.compile(CompactHouseholdTemplate().token_pattern or "")
    words: set[str] = set()
    env: Any = gym.make("spear_envs:spear/ALFWorld-v0", rooms=rooms, max_turns=20).unwrapped
    for prompt, response in play_noisily(env, 40):
        pieces, spoken = pattern.findall(prompt), pattern.findall(response)
        assert "".join(pieces) == prompt
        assert "".join(spoken) == response
        assert " " not in (*pieces, *spoken)  # no blank is a token of its own
        assert len(pieces) <= most
        assert len(spoken) <= 9  # and an end token
        words.update(piece for piece in (*pieces, *spoken) if piece[-1].isdigit())
    assert all(regex.fullmatch(r" [a-z]+ \d+", word) for word in words)
    assert words - {" x 1"} <= set(env.lexicon())


def test_the_lexicon_has_the_names_of_all_splits() -> None:
    for rooms in ("small", "standard"):
        for split in ("train", "valid_seen", "valid_unseen"):
            env: Any = gym.make("spear_envs:spear/ALFWorld-v0", rooms=rooms, split=split).unwrapped
            known = set(env.lexicon())
            for task in env.tasks[:40]:
                env.reset(options={"task": task.id})
                game = env.play.game
                things = (*game.receptacles, *game.object_types)
                assert {f" {game.names[thing]}" for thing in things} <= known


def test_prompts_without_lists_state_the_commands_once() -> None:
    game = start()
    template = HouseholdTemplate(name="unlisted", lists=False)
    prompt = template.render(show(game.opening, commands=game.admissible))
    assert "'go to fridge 1'" not in prompt
    assert "take THING from PLACE" in prompt
    assert "<think>" in prompt
    later = template.follow_up(
        show("You arrive at fridge 1. The fridge 1 is closed.", commands=game.admissible, turn=2)
    )
    assert later == "You arrive at fridge 1. The fridge 1 is closed."
