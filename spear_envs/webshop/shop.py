"""The shop: a state machine over a catalogue, with the grammar of the original's actions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple

from spear_envs.core.errors import SpearError
from spear_envs.core.rewards import Criterion
from spear_envs.webshop.catalog import Catalog
from spear_envs.webshop.goals import Goal
from spear_envs.webshop.pages import (
    BACK_TO_SEARCH,
    BUY_NOW,
    NEXT_PAGE,
    PREVIOUS,
    SUB_PAGES,
    Node,
    ObservationMode,
    list_done,
    list_item,
    list_results,
    list_search,
    list_sub_page,
    write_page,
)
from spear_envs.webshop.products import Product
from spear_envs.webshop.reward import NOTHING_BOUGHT, Score, list_criteria, score_purchase

PAGE_SIZE = 10
"""Products on one page of results."""
SEARCH_ACTION = "search[<your query>]"
"""The search in a list of actions."""

_BACK, _NEXT, _PREVIOUS, _BUY = (name.lower() for name in (BACK_TO_SEARCH, NEXT_PAGE, PREVIOUS, BUY_NOW))
_SUB_PAGES = tuple(name.lower() for name in SUB_PAGES)
_RESULTS_BUTTONS = (_BACK, _NEXT)
_LATER_RESULTS_BUTTONS = (_BACK, _PREVIOUS, _NEXT)
_ITEM_BUTTONS = (_BACK, _PREVIOUS, *_SUB_PAGES, _BUY)


class Page(str, Enum):
    """The kind of the present page."""

    SEARCH = "search"
    """The page with the search bar."""
    RESULTS = "results"
    """A page of search results."""
    ITEM = "item"
    """A product."""
    SUB = "sub"
    """Description, features or reviews of a product."""
    DONE = "done"
    """Something was bought."""


class Played(NamedTuple):
    """The result of an action."""

    ok: bool
    """Whether it was a search, or a click on something that the page offers."""
    score: Score | None = None
    """Of the purchase, if it was one."""


def read_action(action: str) -> tuple[str, str] | None:
    """Read name and lower-case argument of ``name[argument]``; None for another text.

    Both extend as far as possible within one line: ``search[a][b]`` has the name ``search[a]``, and text after the last
    bracket is ignored.
    """
    line = action.partition("\n")[0]
    end = line.rfind("]")
    # A regular expression would take quadratic time on many opening brackets.
    begin = line.rfind("[", 0, max(0, end - 1))
    return None if begin < 1 else (line[:begin], line[begin + 1 : end].lower())


class Shop:
    """One customer in the shop."""

    page: Page
    """Where the customer is."""
    keywords: str | None
    """Of the last search, in lower case; None on the search page."""
    page_number: int
    """Of the results, from 1."""
    number: int | None
    """Number of the open product."""
    sub_page: str
    """``"description"``, ``"features"`` or ``"reviews"`` on such a page, else ``""``."""
    options: dict[str, str]
    """Chosen options of the open product, group to value."""
    hits: list[int]
    """Numbers of all products that the last search found."""
    opened: set[str]
    """ASINs opened since the last visit to the search page."""
    score: Score | None
    """Of the purchase, or None before it."""

    def __init__(self, stock: Catalog, goal: Goal) -> None:
        self._stock = stock
        self.start(goal)

    def start(self, goal: Goal) -> None:
        """Start again with another goal.

        Raises:
            SpearError: the catalogue lacks the goal's product.
        """
        number = self._stock.number_of(goal.asin)
        if number is None:
            raise SpearError(f"The goal's product {goal.asin!r} is not in the catalogue: take goals of this catalogue.")
        self.goal = goal
        self._goal_number = number
        self.score = None
        self._go_home()

    # ---------------------------------------------------------------- looking

    @property
    def product(self) -> Product | None:
        """Return the open product, or None."""
        return None if self.number is None else self._stock.product(self.number)

    @property
    def shown(self) -> list[int]:
        """Return the numbers of the products on the present page of results."""
        return self.hits[(self.page_number - 1) * PAGE_SIZE : self.page_number * PAGE_SIZE]

    def observe(self, mode: ObservationMode = ObservationMode.TEXT) -> str:
        """Return the present page as an observation."""
        return write_page(self.list_nodes(), mode)

    def list_nodes(self) -> list[Node]:
        """Return the present page as nodes."""
        text = self.goal.instruction
        if self.page is Page.SEARCH:
            return list_search(text)
        if self.page is Page.RESULTS:
            products = map(self._stock.product, self.shown)
            return list_results(text, self.page_number, len(self.hits), products, self.opened)
        product = self.product
        assert product is not None
        if self.page is Page.ITEM:
            keywords = (self.keywords or "").replace(" ", "+")
            return list_item(text, product, f"{keywords}/{json.dumps(self.options)}")
        if self.page is Page.SUB:
            return list_sub_page(text, product, self.sub_page)
        assert self.score is not None
        return list_done(product.asin, self.options, self.score.reward)

    def list_actions(self) -> list[str]:
        """List the valid actions: a search on the search page, then clicks in the order of the page.

        Names that the grammar cannot express (an option with an opening bracket, say) are left out.
        """
        first = [SEARCH_ACTION] if self.page is Page.SEARCH else []
        return first + [
            f"click[{name}]"
            for name in self.list_clickables()
            if name and name != "search" and "[" not in name and "\n" not in name
        ]

    @property
    def anchor(self) -> tuple[object, ...]:
        """Return the key of the state: page, keywords, page number, ASIN, sub page, chosen options (sorted pairs)."""
        product = self.product
        return (
            self.page.value,
            self.keywords,
            self.page_number,
            None if product is None else product.asin,
            self.sub_page,
            tuple(sorted(self.options.items())),
        )

    # ---------------------------------------------------------------- acting

    def play(self, action: str) -> Played:
        """Play an action; other texts do nothing."""
        read = read_action(action)
        if read is None or self.page is Page.DONE:
            return Played(False)
        name, argument = read
        if name == "search":
            self.keywords = argument
            self.hits = self._stock.search(argument)
            self._show_results(1)
            return Played(True)
        # The original lists the search button as clickable but ignores clicks on it.
        if name != "click" or argument == "search":
            return Played(False)
        clickables = self.list_clickables()
        if argument not in clickables:
            return Played(False)
        self._click(argument, clickables[argument])
        return Played(True, self.score)

    def list_clickables(self) -> dict[str, Any]:
        """Return the names of clickables in the order of the page; links with their product's number, options with
        their group."""
        if self.page is Page.RESULTS:
            buttons = _RESULTS_BUTTONS if self.page_number == 1 else _LATER_RESULTS_BUTTONS
            found: dict[str, Any] = dict.fromkeys(buttons)
            for number in self.shown:
                found[self._stock.product(number).asin.lower()] = number
            return found
        if self.page is Page.ITEM:
            product = self.product
            assert product is not None
            found = dict.fromkeys(_ITEM_BUTTONS)
            for group, values in product.options.items():
                found.update(dict.fromkeys(values, group))  # a value of two groups belongs to the last one
            return found
        if self.page is Page.SUB:
            return dict.fromkeys((_BACK, _PREVIOUS))
        return {}

    def _click(self, name: str, target: Any) -> None:
        """Follow a clickable; buttons take precedence over options of the same name."""
        if name == _BACK:
            self._go_home()
        elif self.page is Page.RESULTS:
            if name == _NEXT:
                self._show_results(self.page_number + 1)
            elif name == _PREVIOUS:
                self._show_results(self.page_number - 1)
            else:
                self.page, self.number, self.options = Page.ITEM, target, {}
                self.opened.add(self._stock.product(target).asin)
        elif self.page is Page.SUB:
            self.page, self.sub_page = Page.ITEM, ""
        elif name == _PREVIOUS:
            self._show_results(self.page_number)
        elif name == _BUY:
            self._buy()
        elif name in _SUB_PAGES:
            self.page, self.sub_page = Page.SUB, name
        else:
            self.options[target] = name

    def _go_home(self) -> None:
        self.page = Page.SEARCH
        self.keywords = None
        self.page_number = 1
        self.number = None
        self.sub_page = ""
        self.options = {}
        self.hits = []
        self.opened = set()

    def _show_results(self, page_number: int) -> None:
        self.page, self.page_number = Page.RESULTS, page_number
        self.number, self.sub_page, self.options = None, "", {}

    def _buy(self) -> None:
        product = self.product
        assert product is not None and self.number is not None
        self.score = score_purchase(
            self.goal,
            product,
            self._stock.price(self.number),
            self.options,
            self._stock.nouns(self.number),
            self._stock.nouns(self._goal_number),
        )
        self.page = Page.DONE

    def criteria(self) -> list[Criterion]:
        """List the wishes of the goal and how the purchase meets them."""
        if self.score is None or self.number is None:
            return list_criteria(self.goal, None, 0.0, {}, NOTHING_BOUGHT)
        return list_criteria(self.goal, self.product, self._stock.price(self.number), self.options, self.score)

    # ---------------------------------------------------------------- saving

    def save(self) -> dict[str, Any]:
        """Return the state as plain values."""
        return {
            "page": self.page.value,
            "keywords": self.keywords,
            "page_number": self.page_number,
            "number": self.number,
            "sub_page": self.sub_page,
            "options": dict(self.options),
            "hits": list(self.hits),
            "opened": sorted(self.opened),
            "score": self.score and tuple(self.score),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state of :meth:`save` with the same goal."""
        self.page = Page(state["page"])
        self.keywords = state["keywords"]
        self.page_number = state["page_number"]
        self.number = state["number"]
        self.sub_page = state["sub_page"]
        self.options = dict(state["options"])
        self.hits = list(state["hits"])
        self.opened = set(state["opened"])
        self.score = state["score"] and Score(*state["score"])
