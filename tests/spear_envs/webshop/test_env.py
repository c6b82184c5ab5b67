"""The environment ``spear/WebShop-v0``."""

import re
from typing import Any

import pytest
from gymnasium.error import ResetNeeded
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.core.errors import SpearError
from spear_envs.core.prompts import PromptContext
from spear_envs.core.spaces import INFO_KEYS
from spear_envs.testing import check_spear_env
from spear_envs.webshop.env import WebShopEnv
from spear_envs.webshop.reward import NOTHING_BOUGHT, Score
from spear_envs.webshop.shop import SEARCH_ACTION

TASK = "webshop/train/00003"


def make(**kwargs: Any) -> WebShopEnv:
    return WebShopEnv(**{"response_format": "plain", "reward": "native", **kwargs})


def play_all(env: WebShopEnv, actions: list[str]) -> list[Any]:
    """The steps of some actions."""
    return [env.step(env.parser.respond(action)) for action in actions]


def test_contract() -> None:
    check_spear_env("spear/WebShop-v0", resets=200)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"observation_mode": "text_rich", "reward": "native"},
        {"goal_kind": "human", "split_scheme": "original", "split": "all", "response_format": "plain"},
        {"on_malformed": "peer", "split": "test"},
    ],
    ids=["rich", "human", "peer"],
)
@pytest.mark.slow
def test_contract_with_other_keywords(kwargs: dict[str, Any]) -> None:
    check_spear_env("spear/WebShop-v0", **kwargs).raise_on_failure()


def test_episode_of_the_expert() -> None:
    env = make()
    observation, info = env.reset(options={"task": TASK})
    assert set(info) == {*INFO_KEYS, "purchase"}
    assert observation == f"WebShop [SEP] Instruction: [SEP] {info['instruction']} [SEP] Search"
    assert info["admissible_actions"] == [SEARCH_ACTION]
    nothing = {"asin": "", "options": {}, **NOTHING_BOUGHT._asdict()}
    assert (info["anchor"], info["purchase"]) == (("search", None, 1, None, "", ()), nothing)
    plan = env.expert_plan()
    *before, (last, reward, terminated, truncated, info) = play_all(env, plan)
    assert all(step[1:4] == (0.0, False, False) and step[4]["score"] == 0.0 for step in before)
    assert (reward, terminated, truncated, info["won"], info["score"]) == (1.0, True, False, True, 1.0)
    assert info["tool_calls"] == len(plan) == info["turn"]
    assert info["admissible_actions"] == [] and last.startswith("Thank you for shopping with us!")
    goal = env.shop.goal
    assert info["purchase"]["asin"] == goal.asin and info["purchase"]["options"] == dict(goal.options)  # type: ignore[arg-type]
    assert set(info["purchase"]) == {"asin", "options", *Score._fields}
    assert info["subtask"] == goal.category
    with pytest.raises(ResetNeeded):
        env.step("search[x]")


def test_the_score_as_outcome_and_the_search_that_pays_once() -> None:
    env = make(reward="spear", outcome="score", mu=1.0, tool_reward="distinct")
    env.reset(options={"task": TASK})
    for _ in range(3):
        info = env.step(f"search[{env.task.instruction}]")[4]
    assert (info["tool_calls"], info["reward_terms"]["tool_call"], info["reward_terms"]["outcome"]) == (3, 0.1, -1.0)
    rival = next(
        text
        for text in info["admissible_actions"]
        if re.fullmatch(r"click\[\w{10}\]", text) and env.shop.goal.asin.lower() not in text
    )
    env.step(rival)
    info = env.step("click[buy now]")[4]
    assert 0 < info["score"] < 1 and not info["won"]
    assert info["reward_terms"]["outcome"] == pytest.approx(2 * info["score"] - 1)


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"observation_mode": "html"}, "observation_mode='html' is not valid: choose one of 'text', 'text_rich'"),
        ({"split": ""}, "split='' is not valid"),
        ({"split": "valid"}, "split='valid' is not valid: choose one of 'train', 'eval', 'test', 'all'"),
        ({"split_scheme": "random"}, "split_scheme='random' is not valid"),
        ({"goal_kind": "robot"}, "goal_kind='robot' is not valid"),
        ({"histroy": 2}, "has no keyword 'histroy'"),
        ({"response_format": "xml"}, "response_format='xml' is not valid"),
        ({"draws": "often"}, "draws='often' is not valid"),
        ({"title_nouns": "nltk"}, "title_nouns='nltk' is not valid"),
        ({"max_turns": 0}, "max_turns=0 is not valid"),
        ({"catalog": "no/such/folder"}, "no/such/folder"),
        ({"goals": "no/such/file.jsonl"}, "no/such/file.jsonl"),
        ({"goals": "goals.jsonl", "split": "test"}, "a goals file is one list"),
    ],
)
def test_bad_keywords_say_what_is_good(kwargs: dict[str, Any], says: str) -> None:
    with pytest.raises(SpearError) as error:
        make(**kwargs)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_states_of_other_tasks_are_refused() -> None:
    env = make()
    env.reset(options={"task": TASK})
    state = env.get_state()
    for other in (make(price_seed=7), make(split_scheme="verl-agent"), make(goal_kind="human")):
        with pytest.raises(SpearError, match="of other tasks or another catalogue"):
            other.set_state(state)


@pytest.mark.parametrize("split", ["eval", "test"])
def test_lexicon_knows_the_words_of_other_splits(split: str) -> None:
    env = make(observation_mode="text_rich", split=split)
    template = env.templates["compact"]
    pattern = template.token_pattern
    assert pattern is not None
    known = {word for text in env.lexicon() for word in re.findall(pattern, text)}
    unknown = set()
    for task in env.tasks:
        observation, info = env.reset(options={"task": task.id})
        for action in ["", *env.expert_plan()]:
            if action:
                observation, *_, info = env.step(action)
            context = PromptContext(info["instruction"], observation, None, (), 1, env.max_turns)
            unknown |= set(re.findall(pattern, template.render(context))) - known
    assert unknown <= {"search", "done", "*", "~"}  # which no fresh product shows


ENVS = {
    name: make(max_turns=10**6, **kwargs)
    for name, kwargs in {
        "plain": {},
        "tags": {"response_format": "tags", "observation_mode": "text_rich"},
        "peer": {"response_format": "tags", "on_malformed": "peer"},
    }.items()
}


@given(st.integers(0, 10**6), st.lists(st.integers(0, 10**6), max_size=14))
def test_admissible_actions_are_all_ok(seed: int, choices: list[int]) -> None:
    env = ENVS["plain"]
    _, info = env.reset(seed=seed)
    for choice in choices:
        actions = [
            f"search[{info['instruction'][8:40]}]" if action == SEARCH_ACTION else action
            for action in info["admissible_actions"]
        ]
        state = env.get_state()
        for action in actions[:: 1 + len(actions) // 4]:
            assert env.step(action)[4]["action_ok"], action
            env.set_state(state)
        _, _, terminated, _, info = env.step(actions[choice % len(actions)])
        assert info["action_ok"]
        if terminated:
            break
