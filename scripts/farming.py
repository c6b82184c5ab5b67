"""What loops and shortcuts earn in each environment: the tables on the environments' pages.

``python scripts/farming.py`` prints them, ``--write`` puts them between the marks on the pages.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from spear_envs.code.grammar import write_answer, write_call
from spear_envs.core import SpearEnv
from spear_envs.core.making import make_env

DOCS = Path(__file__).resolve().parents[1] / "docs"
START, END = "<!-- farming -->", "<!-- end -->"
SEED = 3
Policy = Callable[[SpearEnv[Any]], Iterator[str]]
"""Yields plain actions for an environment that was just reset, until the episode is over."""
WEIGHTS = (("none", "paper"), ("constant", "paper"), ("constant", "distinct"))
HEAD = (
    '| policy | won | `mu="none"` (default) | `mu="constant"` | and `tool_reward="distinct"` |\n|---|---|---|---|---|'
)


def _repeat(*actions: str) -> Policy:
    def play(env: SpearEnv[Any]) -> Iterator[str]:
        while True:
            yield from actions

    return play


def _expert(env: SpearEnv[Any]) -> Iterator[str]:
    while True:
        yield env.expert_plan()[0]


def _pace(env: SpearEnv[Any]) -> Iterator[str]:
    """Walk to one place and back, where the admissible actions name two."""
    places = [action for action in env._admissible() or () if action.startswith("go to")][:2]
    while True:
        yield from places


def _search_and_return(env: SpearEnv[Any]) -> Iterator[str]:
    while True:
        yield f"search[{env.task.instruction}]"
        yield "click[back to search]"


def _buy_first(env: SpearEnv[Any]) -> Iterator[str]:
    yield f"search[{env.task.instruction}]"
    yield next(action for action in env._admissible() or () if re.fullmatch(r"click\[[a-z]\w{9}\]", action))
    yield "click[buy now]"


def _then(last: str, count: int, action: str) -> Policy:
    def play(env: SpearEnv[Any]) -> Iterator[str]:
        for _ in range(count):
            yield action
        yield last

    return play


WRONG = write_answer("-1")
PAGES: dict[str, tuple[str, dict[str, Policy]]] = {
    "sokoban.md": (
        "spear/Sokoban-v1",
        {"expert": _expert, "against a wall": _repeat("up"), "left and right": _repeat("left", "right")},
    ),
    "alfworld.md": (
        "spear/ALFWorld-v0",
        {"expert": _expert, "`dance`, 50 times": _repeat("dance"), "to and fro between two places": _pace},
    ),
    "webshop.md": (
        "spear/WebShop-v0",
        {
            "expert": _expert,
            "search for the instruction, buy the first hit": _buy_first,
            "one search, 15 times": _repeat("search[a]"),
            "search and back": _search_and_return,
        },
    ),
    "search.md": (
        "spear/SearchR1-v0",
        {
            "expert": _expert,
            "wrong answer at once": _repeat("<answer>nobody knows</answer>"),
            "one query 10 times, then a wrong answer": _then(
                "<answer>nobody knows</answer>", 10, "<search>city</search>"
            ),
            "one query, 32 times": _repeat("<search>city</search>"),
        },
    ),
    "code.md": (
        "spear/CodeInterpreter-v0",
        {
            "expert": _expert,
            "wrong answer at once": _repeat(WRONG),
            "`print(1)` 7 times, then a wrong answer": _then(WRONG, 7, write_call("print(1)")),
        },
    ),
}


def measure(env_id: str, policy: Policy) -> tuple[bool, list[float]]:
    """Whether a policy wins the task of the seed, and what it earns under each of :data:`WEIGHTS`."""
    rewards = []
    won = False
    for mu, kind in WEIGHTS:
        env = make_env(env_id, keywords={"mu": mu, "tool_reward": kind})
        env.reset(seed=SEED)
        reward = 0.0
        actions = policy(env)
        while not env.done:
            _, reward, _, _, info = env.step(env.parser.respond(next(actions)))
            won = info["won"]
        rewards.append(reward)
        env.close()
    return won, rewards


def make_table(page: str) -> str:
    """The table of a page, in Markdown."""
    env_id, policies = PAGES[page]
    rows = []
    for name, policy in policies.items():
        won, rewards = measure(env_id, policy)
        rows.append(f"| {name} | {'yes' if won else 'no'} | " + " | ".join(f"{value:+.2f}" for value in rewards) + " |")
    return "\n".join([HEAD, *rows])


def main() -> None:
    """Print or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put them onto the pages")
    write = parser.parse_args().write
    for page in PAGES:
        table = make_table(page)
        print(f"{page}\n\n{table}\n")
        if write:
            path = DOCS / page
            text = path.read_text(encoding="utf-8")
            before, mark, rest = text.partition(START)
            path.write_text(f"{before}{mark}\n{table}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
