"""The environment ``spear/WebShop-v0``."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from spear_envs.core.env import ActionResult, Anchor, CommonKeywords, SpearEnv
from spear_envs.core.errors import SpearError, choose_member
from spear_envs.core.parsing import PeerParser, ResponseFormat, ResponseParser, TagParser
from spear_envs.core.prompts import PromptTemplate
from spear_envs.core.rewards import Criterion
from spear_envs.core.tasks import Task
from spear_envs.core.tools import CallParser
from spear_envs.webshop.catalogue import MINI, open_catalogue
from spear_envs.webshop.goals import ALL, SPLITS, Goal, GoalTask, SplitScheme
from spear_envs.webshop.oracle import plan_purchase
from spear_envs.webshop.prompts import (
    TOOL_RULES,
    TOOLS,
    CompactShopTemplate,
    ShopTemplate,
    VerbatimParser,
    VerlAgentShopTemplate,
    compress_page,
    compress_task,
    strip_instruction,
)
from spear_envs.webshop.reward import NOTHING_BOUGHT
from spear_envs.webshop.shop import (
    ObservationMode,
    Page,
    Shop,
    add_message,
    list_item,
    list_results,
    list_sub_page,
    read_action,
    write_page,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

_CODE = re.compile(r"[a-z0-9]{10}")
MOST_IN_LEXICON = 10_000
"""Most products whose words make a lexicon; a larger catalogue has too many for a word-level tokenizer."""
_PARSERS: Mapping[ResponseFormat, ResponseParser] = {
    ResponseFormat.TAGS: TagParser(),
    ResponseFormat.PLAIN: VerbatimParser(),
}


class Outcome(str, Enum):
    """The outcome term of the reward."""

    WON = "won"
    """+1 for a purchase with score 1, else -1, as in the paper."""
    SCORE = "score"
    """The score of the purchase, from -1 (nothing bought, or 0) to +1 (score 1): a nearly right purchase earns more
    than a wrong one."""


class WebShopEnv(SpearEnv[str]):
    """WebShop: read the instruction, search, open a product, choose options, buy; one response is one action.

    Actions are ``search[words]`` and ``click[name]``, in the original's grammar; anything else does nothing and costs
    a turn. The native reward is the score on the purchase and 0 on every other turn; ``won`` is a score of exactly 1.
    ``action_ok`` is True for a search and for a click on something that the page offers, and ``tool_calls`` counts
    those. ``info`` has the keys of ``StepInfo`` and ``purchase``, a dictionary of the purchase: the ASIN (empty
    before the purchase), the chosen options, and all terms of the score (see
    :class:`~spear_envs.webshop.reward.Score`; ``NOTHING_BOUGHT`` before). The subtask is
    the product's category.

    Args:
        catalog: ``"mini"``, a name fetched by ``spear data get webshop``, or a folder with a store or official files.
        goals: a ``goals.jsonl[.xz]`` instead of the catalogue's goals. Its task ids are ``webshop/all/<row>``,
            and prices are read from ``prices.json[.xz]`` next to it if that exists.
        goal_kind: ``"synthetic"`` or ``"human"``.
        split: ``"train"`` (default), ``"eval"``, ``"test"`` or ``"all"``; with ``goals`` only ``"all"``.
        split_scheme: ``"original"``, ``"verl-agent"`` or ``"product"``; by default the catalogue's own, which is
            ``"product"`` for the mini catalogue and ``"original"`` for others.
        observation_mode: ``"text"``, the original's byte for byte, or ``"text_rich"``, which shows the chosen options.
        max_turns: responses after which the episode is truncated.
        title_nouns: ``"rule"`` (default), ``"spacy:<model>"``, or a function from a title to its nouns; a store has
            its own nouns.
        price_seed: seed of drawn prices and ceilings; by default 42.
        draws: ``"keyed"`` (default) or ``"sequential"``, as the original draws under a seed.
        outcome: ``"won"`` (default) or ``"score"``: the outcome term, see :class:`Outcome`.
        anchor: ``"state"`` (default), a tuple of page, keywords, page number, ASIN, sub page and chosen options, or
            ``"observation"``, the page without the instruction, see :class:`~spear_envs.core.env.Anchor`.
        common: keywords of every environment, see :class:`CommonKeywords`. With ``"plain"`` the
            whole response is the action, blanks included.

    Raises:
        SpearError: a keyword has an invalid value, or the catalogue cannot be opened.
    """

    templates: Mapping[str, PromptTemplate] = MappingProxyType(  # type: ignore[misc]
        {"default": ShopTemplate(), "verl_agent": VerlAgentShopTemplate(), "compact": CompactShopTemplate()}
    )
    tools = TOOLS
    splits: tuple[str, ...] = SPLITS  # type: ignore[misc]
    peer_parser = PeerParser(tail=20)

    def __init__(
        self,
        catalog: str | os.PathLike[str] = MINI,
        goals: str | os.PathLike[str] | None = None,
        goal_kind: str = "synthetic",
        split: str | None = None,
        split_scheme: str | None = None,
        observation_mode: str = "text",
        max_turns: int = 15,
        title_nouns: str | Callable[[str], Sequence[str]] | None = None,
        price_seed: int | None = None,
        draws: str | None = None,
        outcome: str = "won",
        anchor: str = "state",
        **common: Unpack[CommonKeywords],
    ) -> None:
        if goals is not None and split not in (None, ALL):
            raise SpearError(f"split={split!r}: a goals file is one list; leave split out, or give {ALL!r}.")
        self.outcome = choose_member(Outcome, outcome, "outcome")
        self.anchor = choose_member(Anchor, anchor, "anchor")
        self.observation_mode = choose_member(ObservationMode, observation_mode, "observation_mode")
        self.catalogue = open_catalogue(
            catalog, goals=goals, title_nouns=title_nouns, price_seed=price_seed, draws=draws
        )
        super().__init__(
            self.catalogue.make_tasks(split, goal_kind=goal_kind, split_scheme=split_scheme),
            max_turns=max_turns,
            parser=_PARSERS.__getitem__,
            **common,
        )
        if goals is not None:
            self.splits = (ALL,)
        elif split_scheme == SplitScheme.VERL_AGENT.value:
            self.splits = ("train", "test")
        self.templates = MappingProxyType(
            {
                "default": ShopTemplate(self.parser),
                "verl_agent": VerlAgentShopTemplate(self.parser),
                "compact": CompactShopTemplate(self.parser, self.observation_mode),
                "tools": ShopTemplate(CallParser(TOOLS, self.parser), "tools", rules=TOOL_RULES),
            }
        )
        self._goal_kind = goal_kind
        self._shop: Shop | None = None

    @property
    def shop(self) -> Shop:
        """Return the shop."""
        self.task  # noqa: B018 - raises ResetNeeded before the first episode
        assert self._shop is not None
        return self._shop

    # ---------------------------------------------------------------- hooks of SpearEnv

    def _start(self, task: Task) -> None:
        goal = task.goal if isinstance(task, GoalTask) else Goal.from_row(task.content)
        if self._shop is None:
            self._shop = Shop(self.catalogue, goal)
        else:
            self._shop.start(goal)

    def _act(self, action: str) -> ActionResult:
        shop = self.shop
        read = read_action(action)
        played = shop.play(action)
        score = played.score
        canonical = "" if read is None else f"{read[0]}[{read[1]}]"
        return ActionResult(
            played.ok,
            0.0 if score is None else score.reward,
            won=score is not None and score.reward == 1.0,
            done=score is not None,
            tool_calls=int(played.ok),
            details=self._details(),
            outcome=2.0 * score.reward - 1.0 if score is not None and self.outcome is Outcome.SCORE else None,
            action=action if self._peer else canonical,  # verl-agent's history shows what it could not play, too
        )

    def _details(self) -> dict[str, Any]:
        shop = self.shop
        # Always the same keys and types: gymnasium's vector environments refuse a None that becomes a dictionary.
        if shop.score is None:
            return {"purchase": {"asin": "", "options": {}, **NOTHING_BOUGHT._asdict()}}
        product = shop.product
        assert product is not None
        return {"purchase": {"asin": product.asin, "options": dict(shop.options), **shop.score._asdict()}}

    def criteria(self) -> list[Criterion]:
        """Return the kind of product, each attribute and option, and the price."""
        return self.shop.criteria()

    def _observe(self, message: str) -> str:
        observation = self.shop.observe(self.observation_mode)
        return add_message(observation, message, self.observation_mode) if message else observation

    def _world(self) -> dict[str, Any]:
        return {"tasks": self.tasks.fingerprint, **self.shop.save()}

    def _restore_world(self, state: Mapping[str, Any]) -> None:
        # In another catalogue the numbers of products and the ids of tasks have another meaning.
        if state["tasks"] != self.tasks.fingerprint:
            raise SpearError(
                "The state is of other tasks or another catalogue: make the environment with the same keywords."
            )
        self.shop.restore(state)

    def _anchor(self) -> Hashable:
        if self.anchor is Anchor.OBSERVATION:
            return strip_instruction(self.shop.observe(self.observation_mode), self.task.instruction)
        return self.shop.anchor

    def _admissible(self) -> list[str]:
        return self.shop.list_actions()

    def lexicon(self) -> Iterator[str]:
        """Yield every product and task of the catalogue in the compact form; nothing for a large catalogue."""
        if len(self.catalogue) > MOST_IN_LEXICON:
            return
        for number in range(len(self.catalogue)):
            product = self.catalogue.product(number)
            pages = [list_results("", 1, 0, [product], ()), list_item("", product)]
            pages += [list_sub_page("", product, name) for name in ("description", "features")]
            yield from (compress_page(write_page(nodes, ObservationMode.TEXT_RICH)) for nodes in pages)
        goals = self.catalogue.goals(self._goal_kind)
        yield from (compress_task(goals.goal(position).instruction) for position in range(len(goals)))

    def _score(self) -> float:
        score = self.shop.score
        return 0.0 if score is None else score.reward

    def scripted_action(self) -> str:
        """Return the next action of a simple script: search, open the first hit, choose the named options, buy."""
        shop, instruction = self.shop, self.task.instruction.lower()
        shown = [action[6:-1] for action in shop.list_actions() if action.startswith("click[")]
        if shop.page is Page.RESULTS:
            first = next((name for name in shown if _CODE.fullmatch(name)), None)
            return f"click[{first or 'back to search'}]"
        if shop.page is not Page.ITEM or shop.product is None:
            words = instruction.removeprefix("find me ").rpartition(", and price lower than ")[0] or instruction
            return f"search[{words.replace('[', ' ').replace(']', ' ')}]"
        for group, values in shop.product.options.items():
            named = [value for value in values if value in instruction and value in shown]
            if named and group not in shop.options:
                return f"click[{max(named, key=len)}]"
        return "click[buy now]"

    def expert_plan(self) -> list[str]:
        """Return actions that buy a product with score 1 within the turns left; empty if there are none."""
        return plan_purchase(self.shop, self.catalogue, self.max_turns - self.turn)
