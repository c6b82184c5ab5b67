"""The pages of the shop, as the policy reads them.

A page is a list of nodes: the texts of the original's HTML in order, each with its kind. Two writers turn nodes into an
observation, for ``observation_mode="text"`` and ``"text_rich"``.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum

from spear_envs.webshop.products import Product

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
