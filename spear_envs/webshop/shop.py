"""The shop: a state machine over a catalogue, with the original's actions, and its pages as the policy reads them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from spear_envs.core.errors import SpearError
from spear_envs.core.rewards import Criterion
from spear_envs.webshop.catalogue import Catalogue
from spear_envs.webshop.goals import Goal
from spear_envs.webshop.products import Product
from spear_envs.webshop.reward import NOTHING_BOUGHT, Score, list_criteria, score_purchase

SEPARATOR = " [SEP] "
"""Separator of the fields of a page in ``observation_mode="text"``."""
BACK_TO_SEARCH, NEXT_PAGE, PREVIOUS, BUY_NOW = "Back to Search", "Next >", "< Prev", "Buy Now"
SUB_PAGES = ("Description", "Features", "Reviews")

_SPACES = " \n\t\f\r"  # white space in HTML
_BEFORE_OPTIONS = (
    *("Thank you for shopping with us!", "Your code: ", "None", " (Paste it in your MTurk interface.)"),
    *("Purchased", "asin"),
)
_AFTER_OPTIONS = (
    *("attrs", "None", "category", "None", "query", "None", "product category", "None"),
    *("Target", "asin", "options", "attrs", "price upper", "instuction text", "category", "product category", "query"),
    *("Goal ", "None", "Reward", "Your score (min 0.0, max 1.0)"),
)
_ESCAPED = {ord(character): f"\\u{ord(character):04x}" for character in "<>&'"}


class ObservationMode(str, Enum):
    """The form of a page."""

    TEXT = "text"
    """Stripped fields joined by ``[SEP]``; they do not show the chosen options."""
    TEXT_RICH = "text_rich"
    """A line for each node, with marks around buttons and clicked values."""


class Mark(Enum):
    """The kind of a node."""

    TEXT = "text"
    """Plain text."""
    BUTTON = "button"
    OPTION = "option"
    """A value to choose."""
    CHOSEN = "chosen"
    """A chosen value."""
    LINK = "link"
    """The ASIN of a product; a click opens it."""
    OPENED = "opened"
    """The ASIN of a product opened since the last visit to the search page."""


Node = tuple[Mark, str]
"""Kind and text, blanks at its ends included."""


def write_page(nodes: Iterable[Node], mode: ObservationMode) -> str:
    """Write the observation of a page."""
    return _write_text(nodes) if mode is ObservationMode.TEXT else _write_rich(nodes)


def add_message(observation: str, message: str, mode: ObservationMode) -> str:
    """Add a message of the environment as a further field or line."""
    return f"{observation}{SEPARATOR}{message}" if mode is ObservationMode.TEXT else f"{observation}{message}\n"


def _write_text(nodes: Iterable[Node]) -> str:
    fields = []
    for _, text in nodes:
        stripped = text.strip()
        # A text of HTML's white space alone becomes an empty field, unless it has a line feed.
        if stripped or (text and ("\n" not in text or text.strip(_SPACES))):
            fields.append(stripped)
    return SEPARATOR.join(fields)


def _write_rich(nodes: Iterable[Node]) -> str:
    lines, above = [], []
    for mark, text in nodes:
        if not text.strip(_SPACES):
            if not text or "\n" in text:
                continue
            text = " "
        if mark is Mark.TEXT:
            lines.append(text)
        elif mark is Mark.BUTTON:
            lines.append(f"[button] {text} [button_]")
        elif mark is Mark.OPTION:
            lines.append(f"  [button] {text} [button_]")
        elif mark is Mark.CHOSEN:
            lines.append(f"  [clicked button] {text} [clicked button_]")
            above.append(f"You have clicked {text}.")
        elif mark is Mark.LINK:
            lines.append(f"\n[button] {text} [button_]")
        else:
            lines.append(f"\n[clicked button] {text} [clicked button_]")
    return "".join([f"{line}\n" for line in (*reversed(above), *lines)])


def list_search(instruction: str) -> list[Node]:
    """List the page with the search bar."""
    return [(Mark.TEXT, "WebShop"), (Mark.TEXT, "Instruction: "), (Mark.TEXT, instruction), (Mark.BUTTON, "Search")]


def list_results(
    instruction: str, number: int, total: int, products: Iterable[Product], opened: Collection[str]
) -> list[Node]:
    """List a page of search results.

    Args:
        number: of the page, from 1.
        total: hits of the search, on all pages.
        opened: ASINs opened since the last visit to the search page.
    """
    nodes = [*_list_head(instruction), (Mark.TEXT, f"Page {number} (Total results: {total})")]
    if number > 1:
        nodes.append((Mark.BUTTON, PREVIOUS))
    nodes.append((Mark.BUTTON, NEXT_PAGE))
    for product in products:
        link = Mark.OPENED if product.asin in opened else Mark.LINK
        nodes += [(link, product.asin), (Mark.TEXT, product.title), (Mark.TEXT, product.price_tag)]
    return nodes


def list_item(instruction: str, product: Product, url: str = "") -> list[Node]:
    """List the page of a product.

    Args:
        url: end of the page's address, with the keywords and the chosen options as JSON. As in the original, each value
            that stands there between quotes is marked as chosen: in every group that offers it, where it equals the
            name of a chosen group, and where a query quotes it; but not where JSON escapes one of its characters.
    """
    nodes = [*_list_head(instruction), (Mark.BUTTON, PREVIOUS)]
    for name, values in product.options.items():
        nodes.append((Mark.TEXT, name))
        nodes += [(Mark.CHOSEN if f'"{value}"' in url else Mark.OPTION, value) for value in values]
    nodes += [(Mark.TEXT, text) for text in (product.title, f"Price: {product.price_tag}", "Rating: N.A.")]
    return nodes + [(Mark.BUTTON, name) for name in (*SUB_PAGES, BUY_NOW)]


def list_sub_page(instruction: str, product: Product, name: str) -> list[Node]:
    """List a page about a product: one of :data:`SUB_PAGES`, in lower case. There are no reviews."""
    nodes = [*_list_head(instruction), (Mark.BUTTON, PREVIOUS)]
    if name == "description":
        nodes.append((Mark.TEXT, product.description))
    elif name == "features":
        nodes += [(Mark.TEXT, f" {bullet}") for bullet in product.bullets]
    return nodes


def list_done(asin: str, options: Mapping[str, str], reward: float) -> list[Node]:
    """List the page after the purchase, which does not show the instruction."""
    texts: Sequence[str] = (
        *_BEFORE_OPTIONS,
        asin,
        "options",
        json.dumps(options, sort_keys=True).translate(_ESCAPED),
        *_AFTER_OPTIONS,
        str(reward),
        "Reward Details ",
        "None",
    )
    return [(Mark.TEXT, text) for text in texts]


def _list_head(instruction: str) -> list[Node]:
    return [(Mark.TEXT, "Instruction:"), (Mark.TEXT, instruction), (Mark.BUTTON, BACK_TO_SEARCH)]


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
    """Score of the purchase, or None after another action."""


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
    """Page that the customer is on."""
    keywords: str | None
    """Keywords of the last search, in lower case; None on the search page."""
    page_number: int
    """Number of the page of results, from 1."""
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
    """Score of the purchase, or None before it."""

    def __init__(self, catalogue: Catalogue, goal: Goal) -> None:
        self._catalogue = catalogue
        self.start(goal)

    def start(self, goal: Goal) -> None:
        """Start again with another goal.

        Raises:
            SpearError: the catalogue lacks the goal's product.
        """
        number = self._catalogue.number_of(goal.asin)
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
        return None if self.number is None else self._catalogue.product(self.number)

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
            products = map(self._catalogue.product, self.shown)
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
            self.hits = self._catalogue.search(argument)
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
                found[self._catalogue.product(number).asin.lower()] = number
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
                self.opened.add(self._catalogue.product(target).asin)
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
            self._catalogue.price(self.number),
            self.options,
            self._catalogue.nouns(self.number),
            self._catalogue.nouns(self._goal_number),
        )
        self.page = Page.DONE

    def criteria(self) -> list[Criterion]:
        """List the wishes of the goal and how the purchase meets them."""
        if self.score is None or self.number is None:
            return list_criteria(self.goal, None, 0.0, {}, NOTHING_BOUGHT)
        return list_criteria(self.goal, self.product, self._catalogue.price(self.number), self.options, self.score)

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
