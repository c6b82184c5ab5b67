"""The embedded games, and what prompts show."""

import random
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import gymnasium as gym
import pytest
import regex

from spear_envs.alfworld import tasks as embedded
from spear_envs.alfworld.gamefile import SUBTASKS, load_game
from spear_envs.alfworld.interpreter import Interpreter
from spear_envs.alfworld.oracle import plan
from spear_envs.alfworld.pddl import GameError
from spear_envs.alfworld.prompts import CompactHouseholdTemplate
from spear_envs.alfworld.synthesis.games import make_game
from spear_envs.alfworld.synthesis.rooms import RoomSize
from spear_envs.alfworld.tasks import SPLITS, EmbeddedGame, EmbeddedTaskSet, list_embedded
from spear_envs.core.prompts import PromptContext
from spear_envs.core.tasks import check_disjoint
from tests.spear_envs.alfworld.synthetic import describe_game, describe_layout, open_synthetic

SIZES = {
    RoomSize.STANDARD: {"train": 600, "valid_seen": 120, "valid_unseen": 120},
    RoomSize.SMALL: {"train": 2400, "valid_seen": 240, "valid_unseen": 240},
}
FINGERPRINTS = {
    RoomSize.STANDARD: {
        "train": "bc1b8dd6252d194d8e72c3ed861caac46a380cc9a14312dee95812343f716ba2",
        "valid_seen": "4f147a843ee17c8cfb77684c5af6ed560ff63013ce572c842d7d1e9d4a118bda",
        "valid_unseen": "095caa4752407f96eb62e363bfd4a38a1cf34a20affce06cdf6cea479068f939",
    },
    RoomSize.SMALL: {
        "train": "1337d3ae40ff5ef6f85ea4e7082406cff8d493f0d782fb109c20fd92f727b590",
        "valid_seen": "714dc82a45418aaa44a850478356badbbf09c256d3bb9309553e9c45210d1870",
        "valid_unseen": "b3431d8dc81095506de611cfae4024790a8a72a4a96a4faf8e48eede87d7b365",
    },
}
"""They may never change within a version of the id."""

each_size = pytest.mark.parametrize("size", RoomSize, ids=lambda size: size.value)


@dataclass(frozen=True)
class Facts:
    """What is to be known of one game."""

    digest: str
    content: Hashable
    layout: Hashable
    receptacles: int
    commands: int
    """Of the expert's plan, which has won."""


def find_facts(entry: EmbeddedGame) -> Facts:
    """Make the game and let the expert win it."""
    made = make_game(entry.task_type, entry.split, entry.seed, entry.size)
    play = Interpreter(open_synthetic(made))
    commands = plan(play.game, play.state)
    for command in commands:
        assert not play.won and play.step(command)[1] is not None
    assert play.won
    game = play.game
    return Facts(made.digest, describe_game(game), describe_layout(game), len(game.receptacles), len(commands))


@lru_cache(maxsize=2)
def make_all(size: RoomSize) -> dict[str, list[Facts]]:
    """All listed games of a size, made by the synthesizer."""
    return {split: [find_facts(one) for one in list_embedded(split, size)] for split in SPLITS}


@each_size
@pytest.mark.slow
def test_every_listed_game_comes_out_as_listed_and_is_won(size: RoomSize) -> None:
    for split, games in make_all(size).items():
        listed = list_embedded(split, size)
        assert [game.digest for game in games] == [one.digest for one in listed]
        assert len(listed) == SIZES[size][split]
        counts = Counter(one.task_type.subtask for one in listed)
        assert set(counts) == set(SUBTASKS) and len(set(counts.values())) == 1
        assert Counter(one.task_type.subtask for one in listed[:60]) == dict.fromkeys(SUBTASKS, 10)
        assert all(3 <= game.commands <= 11 for game in games)


@each_size
@pytest.mark.slow
def test_splits_share_neither_games_nor_unseen_rooms(size: RoomSize) -> None:
    made = make_all(size)
    games = {split: {game.content for game in made[split]} for split in SPLITS}
    layouts = {split: {game.layout for game in made[split]} for split in SPLITS}
    assert all(len(games[split]) == len(made[split]) for split in SPLITS)  # nor does a split have a game twice
    assert not games["train"] & (games["valid_seen"] | games["valid_unseen"])
    assert not games["valid_seen"] & games["valid_unseen"]
    assert layouts["valid_seen"] <= layouts["train"]
    assert not layouts["valid_unseen"] & layouts["train"]
    assert len(layouts["train"]) >= 60 and len(layouts["valid_unseen"]) >= 20
    assert check_disjoint(*(EmbeddedTaskSet(split, size) for split in SPLITS)) == sum(SIZES[size].values())


@pytest.mark.parametrize(("size", "split"), [(size, split) for size in RoomSize for split in SPLITS])
def test_fingerprints_are_known_without_making_games(
    size: RoomSize, split: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "make_game", None)
    tasks = EmbeddedTaskSet(split, size)
    assert tasks.fingerprint == FINGERPRINTS[size][split]
    assert tasks.digest(0) != tasks.digest(-1)
    assert repr(tasks).endswith(f"{SIZES[size][split]} tasks>")


def test_tasks() -> None:
    tasks = EmbeddedTaskSet("train", RoomSize.SMALL)
    task = tasks[5]
    assert task.id == "alfworld/embedded-small/train/00005"
    assert (task.split, task.subtask) == ("train", "pick2")
    source = tasks.source(task)
    assert source.path is None
    text = source.read()
    assert (text.sentence, text.task_type) == (task.instruction, "pick_two_obj_and_place")
    assert text.grammar is None and text.domain is None
    assert load_game(source).task == task.instruction
    assert tasks.get(task.id) is tasks[5] and task.id in tasks
    assert EmbeddedTaskSet("valid_seen", RoomSize.STANDARD)[119].id == "alfworld/embedded/valid_seen/00119"
    assert len({game.key for game in list_embedded("train")}) == 600


def test_a_game_that_comes_out_different_is_refused() -> None:
    entry = replace(list_embedded("train")[0], digest="0" * 64)
    with pytest.raises(GameError, match=r"standard/train/pick/0 differs from the listed one"):
        entry.read()


def show(observation: str, *history: tuple[str, str], commands: tuple[str, ...] = (), turn: int = 1) -> PromptContext:
    return PromptContext("put a hot apple in fridge.", observation, commands, history, turn, 50)


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
