"""The expert: full knowledge of the state, short plans, from any state of any game of the six task types."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, product

from spear_envs.alfworld.drafts import Draft, StuckError, WonError
from spear_envs.alfworld.game import Game
from spear_envs.alfworld.goals import FLUENTS
from spear_envs.alfworld.interpreter import Interpreter
from spear_envs.alfworld.state import State
from spear_envs.alfworld.wishes import Literal, Wish, read_wishes

_MOST_PLACINGS = 256


def plan(game: Game, state: State) -> list[str]:
    """Commands that win from ``state``; empty if it is won already, or if no plan is found.

    Every way to fulfil the goal is tried with every receptacle that differs from the others, and the shortest plan is
    taken. Within one try, things are fetched cheapest first, so a shorter plan may exist for two things. Plans are
    found for goals that place things in receptacles, have them clean, hot or cool, have one held, and lamps lit; they
    are only returned if the goal holds at the end.
    """
    if game.goal.holds(state):
        return []
    best: list[str] = []
    for wish in read_wishes(game.goal.expression):
        for draft in _draft_plans(game, state, wish):
            if not best or len(draft.commands) < len(best):
                best = draft.commands
    return best


def is_winnable(game: Game) -> bool:
    """Whether a game is not won at its start and the plan wins it, command by command, in the interpreter."""
    play = Interpreter(game)
    if play.won:
        return False
    for command in plan(game, play.state):
        if play.won or play.step(command)[1] is None:
            return False
    return play.won


def list_wanted(game: Game, state: State) -> list[str]:
    """Things that the goal may be about, wherever they are: to be moved, held or lit, by their types."""
    found: set[str] = set()
    for wish in read_wishes(game.goal.expression):
        for term in _list_objects(wish):
            found.update(_list_candidates(game, state, wish, term))
    return sorted(found)


def _draft_plans(game: Game, state: State, wish: Wish) -> Iterator[Draft]:
    """Yield a winning plan for each choice of receptacles that makes a difference."""
    candidates = {term: _list_candidates(game, state, wish, term) for term in _list_objects(wish)}
    targets = sorted({receptacle for _, receptacle in wish.placed})
    options = [_list_targets(game, state, wish, term, candidates) for term in targets]
    for chosen in islice(product(*options), _MOST_PLACINGS):
        draft = Draft(game, state)
        try:
            _fill_draft(draft, wish, candidates, dict(zip(targets, chosen, strict=True)))
        except WonError:
            yield draft
        except StuckError:
            continue


def _list_objects(wish: Wish) -> list[str]:
    return sorted({*(thing for thing, _ in wish.placed), *wish.held, *wish.lit})


def _fits(game: Game, state: State, name: str, literals: Sequence[Literal]) -> bool:
    """Whether facts that plans do not change hold for a thing."""
    for predicate, _, *others in literals:
        if predicate == "type":
            if others[0] not in (game.problem.objects[name], "object"):
                return False
        elif predicate in FLUENTS:
            if not state.has_property(predicate, name):
                return False
        elif (name, *others) not in game.problem.rows(predicate):
            return False
    return True


def _list_candidates(game: Game, state: State, wish: Wish, term: str) -> list[str]:
    """Things that a term may stand for."""
    if not term.startswith("?"):
        return [term]
    literals = wish.kinds.get(term, ())
    typed = next((literal for literal in literals if literal[0] in ("objecttype", "receptacletype")), None)
    names = sorted(game.problem.objects)
    if typed is not None:
        names = sorted(name for name, kind in game.problem.rows(typed[0]) if kind == typed[2])
    return [name for name in names if _fits(game, state, name, literals)]


def _list_targets(
    game: Game, state: State, wish: Wish, term: str, candidates: Mapping[str, Sequence[str]]
) -> list[str]:
    """Receptacles that a term may stand for, one of each group that is equivalent for a plan."""
    things = {name for thing, receptacle in wish.placed if receptacle == term for name in candidates[thing]}
    spots = {game.location_of[one] for one in game.receptacles if not things.isdisjoint(state.contents[one])}
    spots |= {game.location_of[one] for one in game.receptacles if _is_appliance(game, one)} | {state.location}
    different: dict[tuple[object, ...], str] = {}
    for receptacle in _list_candidates(game, state, wish, term):
        location = game.location_of.get(receptacle)
        if location is not None:
            key = (
                location if location in spots else "",
                receptacle in game.openable and receptacle not in state.opened,
                tuple(thing for thing in state.contents[receptacle] if thing in things),
                game.receptacle_types.get(receptacle),
            )
            different.setdefault(key, receptacle)
    return list(different.values())


def _is_appliance(game: Game, receptacle: str) -> bool:
    kinds = game.receptacle_types.get(receptacle, frozenset())
    return not kinds.isdisjoint({"fridgetype", "microwavetype", *game.wording.sinks})


def _fill_draft(draft: Draft, wish: Wish, candidates: Mapping[str, Sequence[str]], targets: Mapping[str, str]) -> None:
    """Place things, cheapest first; then take what is to be held; then light the lamps."""
    chosen: dict[str, str] = {}  # object term -> object
    waiting = list(wish.placed)
    for thing, target in wish.placed:  # what is already right stays there
        contents = draft.state.contents[targets[target]]
        for name in candidates[thing]:
            right = name in contents and not draft.list_missing(name, wish.needs(thing))
            if right and thing not in chosen and _is_free(wish, thing, name, chosen):
                chosen[thing] = name
                waiting.remove((thing, target))
    while waiting:
        options = []
        for thing, target in waiting:
            for name in candidates[thing]:
                if chosen.get(thing, name) == name and _is_free(wish, thing, name, chosen):
                    missing = draft.list_missing(name, wish.needs(thing))
                    cost = draft.cost_to_place(name, targets[target], missing)
                    if cost is not None:
                        options.append((cost, thing, target, name))
        if not options:
            raise StuckError
        _, thing, target, name = min(options)
        chosen[thing] = name
        waiting.remove((thing, target))
        draft.fetch(name)
        draft.treat(name, wish.needs(thing), draft.game.location_of[targets[target]])
        draft.put(targets[target])
    _hold_and_light(draft, wish, candidates, chosen)


def _is_free(wish: Wish, term: str, name: str, chosen: Mapping[str, str]) -> bool:
    """Whether a term may stand for ``name``, given the terms that must differ from it."""
    for left, right in wish.different:
        other = right if left == term else left if right == term else None
        if other is not None and chosen.get(other, other) == name:
            return False
    return True


def _hold_and_light(
    draft: Draft, wish: Wish, candidates: Mapping[str, Sequence[str]], chosen: Mapping[str, str]
) -> None:
    """Take what is to be held and go to the lit lamp, as far as the goal wants that."""
    state, location_of = draft.state, draft.game.location_of
    lamps = _list_lamps(draft, wish, candidates)
    if not wish.held:
        if lamps:
            here = state.location
            draft.light(*min(lamps, key=lambda one: (location_of[one[1]] != here, one[0] not in state.toggled, one)))
        return
    (term,) = wish.held[:1]  # there is one pair of hands
    options: list[tuple[int, str, int]] = []
    for name in candidates[term]:
        cost = draft.cost_to_place(name, None, draft.list_missing(name, wish.needs(term)))
        fetched = draft.cost_to_fetch(name)
        if cost is None or fetched is None or name in chosen.values() or not _is_free(wish, term, name, chosen):
            continue
        for number, (lamp, stand) in enumerate(lamps):
            options.append((cost + (location_of[stand] != fetched[1]) + (lamp not in state.toggled), name, number))
        if not lamps:
            options.append((cost, name, 0))
    if not options:
        raise StuckError
    _, name, number = min(options)
    draft.fetch(name)
    draft.treat(name, wish.needs(term), None)
    if lamps:
        draft.light(*lamps[number])


def _list_lamps(draft: Draft, wish: Wish, candidates: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    """Lamps that are lit or can be, each with a receptacle that holds it; empty if the goal wants none."""
    game, state = draft.game, draft.state
    lamps = [
        (lamp, receptacle)
        for term in wish.lit[:1]
        for lamp in candidates[term]
        for receptacle in game.receptacles
        if lamp in state.contents[receptacle] and (lamp in game.toggleable or lamp in state.toggled)
    ]
    if wish.lit and not lamps:
        raise StuckError
    return lamps
