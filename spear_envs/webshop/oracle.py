"""The expert: it knows the wanted product, and finds and buys it with the ordinary actions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from itertools import product as combine

from spear_envs.webshop.catalogue import Catalogue
from spear_envs.webshop.goals import NO_CEILING, Goal
from spear_envs.webshop.products import Product
from spear_envs.webshop.reward import count_option_hits, score_purchase
from spear_envs.webshop.shop import (
    BACK_TO_SEARCH,
    BUY_NOW,
    NEXT_PAGE,
    PAGE_SIZE,
    PREVIOUS,
    SUB_PAGES,
    Page,
    Shop,
    read_action,
)

MOST_CHOICES = 8
"""Most values tried for each wanted option; the exact one comes first."""
MOST_WAYS = MOST_CHOICES**6
"""Most combinations of them that are tried, those of the first values first."""
_BUTTONS = frozenset(name.lower() for name in (BACK_TO_SEARCH, NEXT_PAGE, PREVIOUS, BUY_NOW, *SUB_PAGES))
_BACK, _NEXT, _PREVIOUS, _BUY = (f"click[{name.lower()}]" for name in (BACK_TO_SEARCH, NEXT_PAGE, PREVIOUS, BUY_NOW))


def plan_purchase(shop: Shop, catalogue: Catalogue, turns: int) -> list[str]:
    """Plan actions that buy a product with score 1 from the present page.

    Queries come from the instruction: its words first, then its options and attributes, and the title of the wanted
    product only if those do not lead to it in time. The plan continues from a page of results or of a product unless a
    new search is shorter. If the wanted product cannot be bought in time, any other one that scores 1 will do.

    Args:
        shop: the customer; unchanged.

    Returns:
        At most ``turns`` actions in plain form; empty if there is no plan, or after a purchase.
    """
    if shop.page is Page.DONE:
        return []
    planner = _Planner(shop, catalogue)
    wanted = catalogue.number_of(shop.goal.asin)
    for numbers in ((wanted,), None):
        routes = (*planner.stay(), *planner.browse(numbers), *planner.restart(numbers, turns))
        fitting = [route for route in routes if len(route) <= turns]
        if fitting:
            return min(fitting, key=len)
    return []


def list_queries(goal: Goal) -> list[str]:
    """List queries to try for a goal, in order; the first is the instruction without options and ceiling."""
    pairs = [option for option in goal.options if not isinstance(option, str)]
    values = " ".join(option if isinstance(option, str) else option[1] for option in goal.options)
    asked = goal.instruction
    if goal.price_upper < NO_CEILING:
        asked = asked.rpartition(", and price lower than ")[0] or asked
    if pairs:
        asked = asked.rpartition(f" with {pairs[0][0]}: {pairs[0][1]}")[0] or asked
    asked = asked.removeprefix("Find me ")
    attributes = " ".join(goal.attributes)
    queries = (
        asked,
        f"{asked} {values}",
        f"{attributes} {goal.query}",
        f"{attributes} {values} {goal.query}",
        goal.title,
    )
    # In one line and without brackets, as the grammar of actions allows.
    cleaned = (" ".join(query.replace("[", " ").replace("]", " ").split()) for query in queries)
    return list(dict.fromkeys(filter(None, cleaned)))


class _Planner:
    """Ways to a purchase from the present page; each is a list of actions that ends with a score of 1."""

    def __init__(self, shop: Shop, catalogue: Catalogue) -> None:
        self._shop = shop
        self._catalogue = catalogue
        self._goal = shop.goal
        goal_number = catalogue.number_of(shop.goal.asin)
        self._goal_nouns = [] if goal_number is None else catalogue.nouns(goal_number)
        self._bought: dict[int, list[str] | None] = {}

    def stay(self) -> Iterator[list[str]]:
        """Buy the product that is open."""
        number = self._shop.number
        if number is not None:
            actions = self._buy(number, self._shop.options)
            if actions is not None:
                yield [_PREVIOUS, *actions] if self._shop.page is Page.SUB else actions

    def browse(self, numbers: Sequence[int | None] | None) -> Iterator[list[str]]:
        """Continue with the hits of the last search: to products ``numbers``, or to any."""
        shop = self._shop
        steps = {Page.RESULTS: 0, Page.ITEM: 1, Page.SUB: 2}.get(shop.page)
        if steps is not None:
            for route in self._pick(shop.hits, shop.page_number, numbers):
                yield [_PREVIOUS] * steps + route

    def restart(self, numbers: Sequence[int | None] | None, turns: int) -> Iterator[list[str]]:
        """Search again, with the first query that leads to one of the products within the turns."""
        start = [] if self._shop.page is Page.SEARCH else [_BACK]
        for query in list_queries(self._goal):
            head = [*start, f"search[{query}]"]
            routes = [head + route for route in self._pick(self._catalogue.search(query.lower()), 1, numbers)]
            shortest = min(routes, key=len, default=None)
            if shortest is not None and len(shortest) <= turns:
                yield shortest
                return

    def _pick(self, hits: Sequence[int], page: int, numbers: Sequence[int | None] | None) -> Iterator[list[str]]:
        """Turn from page ``page`` of results to a product, open and buy it."""
        for position, number in enumerate(hits):
            if numbers is None or number in numbers:
                actions = self._buy_fresh(number)
                if actions is not None:
                    pages = position // PAGE_SIZE + 1 - page
                    turning = [_NEXT] * pages if pages > 0 else [_PREVIOUS] * -pages
                    yield [*turning, f"click[{self._catalogue.product(number).asin.lower()}]", *actions]

    def _buy_fresh(self, number: int) -> list[str] | None:
        if number not in self._bought:
            self._bought[number] = self._buy(number, {})
        return self._bought[number]

    def _buy(self, number: int, chosen: Mapping[str, str]) -> list[str] | None:
        """Choose the missing options and buy, on the page of a product; None if that cannot score 1."""
        catalogue, goal = self._catalogue, self._goal
        product = catalogue.product(number)
        choices = _choose_options(goal, product, chosen)
        if choices is None:
            return None
        score = score_purchase(
            goal, product, catalogue.price(number), {**chosen, **choices}, catalogue.nouns(number), self._goal_nouns
        )
        return [*(f"click[{value}]" for value in choices.values()), _BUY] if score.reward == 1.0 else None


def _choose_options(goal: Goal, product: Product, chosen: Mapping[str, str]) -> dict[str, str] | None:
    """Return the fewest further choices, group to value, that meet every option of the goal; None if none do.

    A value that two groups offer belongs to the last one, as in the shop.
    """
    groups = {value: group for group, values in product.options.items() for value in values}
    offered = [
        value for value in groups if value not in _BUTTONS and read_action(f"click[{value}]") == ("click", value)
    ]
    ways = []
    for requirement in goal.options:
        exact = requirement if isinstance(requirement, str) else requirement[1]
        meeting = [value for value in offered if count_option_hits([value], [requirement])]
        meeting.sort(key=lambda value: (chosen.get(groups[value]) != value, value != exact))
        ways.append(meeting[:MOST_CHOICES])
    best: dict[str, str] | None = None
    for values in islice(combine(*ways), MOST_WAYS):
        choice: dict[str, str] = {}
        if any(choice.setdefault(groups[value], value) != value for value in values):
            continue
        further = {group: value for group, value in choice.items() if chosen.get(group) != value}
        if best is None or len(further) < len(best):
            best = further
    return best
