"""Episodes on the mini catalogue, written down step by step.

``python -m tests.spear_envs.webshop.record`` writes ``recordings.jsonl`` anew. Do so only after a change that is meant
to change what the shop shows or pays, and read the difference.
"""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from spear_envs.webshop.env import WebShopEnv
from spear_envs.webshop.shop import SEARCH_ACTION

RECORDINGS = Path(__file__).with_name("recordings.jsonl")

Player = Callable[[WebShopEnv, random.Random], Iterator[str]]


def make_env(**kwargs: Any) -> WebShopEnv:
    """The environment that episodes are recorded with and replayed in."""
    return WebShopEnv(response_format="plain", reward="native", **kwargs)


def describe(observation: str, reward: float, done: bool, info: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a step; actions without their ``click[`` and ``]``."""
    actions = [action.removeprefix("click[").removesuffix("]") for action in info["admissible_actions"]]
    kept = {"reward": reward, "done": done, "ok": info["action_ok"], "score": info["score"]}
    usual = {"reward": 0.0, "done": False, "ok": True, "score": 0.0}
    different = {key: value for key, value in kept.items() if value != usual[key]}
    return {"observation": observation, "actions": actions, **different}


def shorten(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps with the number of an earlier one instead of a page that was seen then."""
    first: dict[str, int] = {}
    shortened = []
    for number, step in enumerate(steps):
        page = json.dumps([step["observation"], step["actions"]])
        seen = first.setdefault(page, number)
        rest = {key: value for key, value in step.items() if key not in ("observation", "actions")}
        shortened.append(step if seen == number else {**rest, "page_of_step": seen})
    return shortened


def buy_right(env: WebShopEnv, rng: random.Random) -> Iterator[str]:
    """What the expert does."""
    yield from env.expert_plan()


def buy_wrong_option(env: WebShopEnv, rng: random.Random) -> Iterator[str]:
    """The right product with the first option that was not asked for, after a look at two sub pages."""
    plan = env.expert_plan()
    opened = next(i for i, action in enumerate(plan) if action.startswith("click[z0"))
    yield from plan[: opened + 1]
    yield from ("click[features]", "click[< prev]", "click[description]", "click[< prev]")
    product = env.shop.product
    assert product is not None
    wanted = {option[1] for option in env.shop.goal.options}
    yield from (f"click[{value}]" for values in product.options.values() for value in values if value not in wanted)
    yield "click[buy now]"


def buy_first_hit(env: WebShopEnv, rng: random.Random) -> Iterator[str]:
    """Another product: the first on the first page that was not asked for."""
    yield env.expert_plan()[0]
    wrong = next(n for n in env.shop.shown if env.catalogue.product(n).asin != env.shop.goal.asin)
    yield f"click[{env.catalogue.product(wrong).asin}]"
    yield "click[Buy Now] please"


def buy_too_dear(env: WebShopEnv, rng: random.Random) -> Iterator[str]:
    """All that was asked for, at too high a price."""
    yield env.expert_plan()[0]
    goal, catalogue = env.shop.goal, env.catalogue
    while True:
        for number in env.shop.shown:
            product = catalogue.product(number)
            if set(goal.attributes) <= set(product.attributes) and catalogue.price(number) > goal.price_upper:
                yield f"click[{product.asin.lower()}]"
                yield from (f"click[{option[1]}]" for option in goal.options)
                yield "click[buy now]"
                return
        yield "click[next >]"


def turn_pages(env: WebShopEnv, rng: random.Random) -> Iterator[str]:
    """Beyond the last page of results and back, and a search that finds nothing."""
    yield "search[tangle]"
    yield from ["click[next >]"] * 6
    yield from ["click[< prev]"] * 2
    yield "click[back to search]"
    yield "search[zzzz]"
    yield "click[next >]"


def make_noise(env: WebShopEnv, rng: random.Random) -> Iterator[str]:
    """What is not an action, or none here."""
    yield from ("click[buy now]", "search[]", " search[oil]", "SEARCH[oil]", "search[oil\nlamp]", "search[oil][lamp]")
    yield from ("search[<b>Café & 12\"</b> it's]", "click[search]", "click[z0]", "no action", "search[rosé crème]")


def walk(env: WebShopEnv, rng: random.Random) -> Iterator[str]:
    """Any valid action, purchases only at the end."""
    for _ in range(10):
        actions = [action for action in env.shop.list_actions() if action != "click[buy now]"]
        action = rng.choice(actions[1:] if len(actions) > 1 else actions)
        yield action if action != SEARCH_ACTION else f"search[{' '.join(rng.sample(env.task.instruction.split(), 3))}]"
    if "click[buy now]" in env.shop.list_actions():
        yield "click[buy now]"


# Which player plays which task, in which environment.
EPISODES: tuple[tuple[Player, str, dict[str, Any]], ...] = (
    (buy_right, "webshop/test/00000", {"split": "test"}),
    (buy_right, "webshop/eval/00000", {"split": "eval"}),
    (buy_right, "webshop/train/00000", {}),
    (buy_right, "webshop/test/00001", {"split": "test", "goal_kind": "human"}),
    (buy_right, "webshop/test/00002", {"split": "test", "observation_mode": "text_rich"}),
    (buy_wrong_option, "webshop/test/00003", {"split": "test"}),
    (buy_wrong_option, "webshop/test/00004", {"split": "test", "observation_mode": "text_rich"}),
    (buy_wrong_option, "webshop/test/00005", {"split": "test", "goal_kind": "human"}),
    (buy_first_hit, "webshop/test/00006", {"split": "test"}),
    (buy_too_dear, "webshop/test/00007", {"split": "test"}),
    (buy_first_hit, "webshop/train/00008", {"goal_kind": "human"}),
    (turn_pages, "webshop/test/00009", {"split": "test"}),
    (make_noise, "webshop/test/00010", {"split": "test"}),
    *((walk, f"webshop/test/{i:05d}", {"split": "test"}) for i in range(11, 14)),
    (walk, "webshop/train/00014", {"observation_mode": "text_rich"}),
)


def play_episodes() -> Iterator[dict[str, Any]]:
    """All episodes, and one for each kind of value that needs care."""
    for number, (player, task, kwargs) in enumerate((*EPISODES, *_find_careful())):
        env = make_env(**kwargs)
        observation, info = env.reset(options={"task": task})
        steps = [{"action": None, **describe(observation, 0.0, False, info)}]
        for action in player(env, random.Random(number)):
            observation, reward, terminated, _, info = env.step(action)
            steps.append({"action": action, **describe(observation, reward, terminated, info)})
            if env.done:
                break
        yield {"kind": player.__name__, "task": task, "kwargs": kwargs, "steps": shorten(steps)}


def _find_careful() -> Iterator[tuple[Player, str, dict[str, Any]]]:
    """Tasks whose options hold an accent, a quote, a slash, an ampersand or a bracket of HTML, the first of each."""
    env = make_env(split="all")
    for mark in ("é", '"', "'", " | ", "&", "<"):
        task = next(task for task in env.tasks if any(mark in value for value in task.content["goal_options"].values()))
        yield buy_right, task.id, {"split": "all"}


def main() -> None:
    """Write the recordings."""
    rows = [json.dumps(row, ensure_ascii=False) for row in play_episodes()]
    RECORDINGS.write_text("\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
