"""Families of problems about counting."""

from __future__ import annotations

from math import comb, gcd

from problems.family import Family, Parameters
from spear_envs.core.dice import Dice

# ---------------------------------------------------------------- lattice paths around forbidden points


def draw_paths(dice: Dice, level: int) -> Parameters:
    size = (5, 8, 12)[level - 1]
    width, height = dice.between(size - 2, size), dice.between(size - 2, size)
    points: list[tuple[int, int]] = []
    while len(points) < level:
        point = dice.between(0, width), dice.between(0, height)
        if point not in ((0, 0), (width, height), *points):
            points.append(point)
    return (width, height, *(value for point in sorted(points) for value in point))


def describe_paths(width: int, height: int, *points: int) -> str:
    listed = ", ".join(f"$({x}, {y})$" for x, y in zip(points[::2], points[1::2], strict=True))
    noun = "the point" if len(points) == 2 else "any of the points"
    return (
        f"A path goes from $(0, 0)$ to $({width}, {height})$ in steps of one unit to the right or one unit up. How many"
        f" such paths do not visit {noun} {listed}?"
    )


def answer_paths(width: int, height: int, *points: int) -> int:
    stops = [*sorted(zip(points[::2], points[1::2], strict=True)), (width, height)]
    first: list[int] = []  # paths to each stop that visit no stop before
    for number, (x, y) in enumerate(stops):
        total = comb(x + y, x)
        for (a, b), ways in zip(stops[:number], first, strict=True):
            if a <= x and b <= y:
                total -= ways * comb(x - a + y - b, x - a)
        first.append(total)
    return first[-1]


def code_paths(width: int, height: int, *points: int) -> str:
    listed = ", ".join(f"({x}, {y})" for x, y in zip(points[::2], points[1::2], strict=True))
    return f"""\
from functools import lru_cache
forbidden = {{{listed}}}

@lru_cache(None)
def count(x, y):
    if x < 0 or y < 0 or (x, y) in forbidden:
        return 0
    return 1 if x == y == 0 else count(x - 1, y) + count(x, y - 1)

print(count({width}, {height}))"""


# ---------------------------------------------------------------- necklaces


def draw_necklaces(dice: Dice, level: int) -> Parameters:
    low, high = ((20, 1_000), (1_000, 6_000), (6_000, 40_000))[level - 1]
    while True:
        beads, colours = dice.between(3, 15), dice.between(2, 14)
        if low <= colours**beads <= high:
            return beads, colours, dice.below(2), dice.below(2)


def describe_necklaces(beads: int, colours: int, mirrored: int, proper: int) -> str:
    same = "rotated or turned over" if mirrored else "rotated"
    rule = " so that no two beads next to each other have the same colour" if proper else ""
    return (
        f"Each of the {beads} beads of a closed necklace gets one of {colours} colours{rule}; not every colour need be"
        f" used. Two necklaces are the same if one can be {same} into the other. How many different necklaces are"
        " there?"
    )


def answer_necklaces(beads: int, colours: int, mirrored: int, proper: int) -> int:
    def count_cycle(length: int) -> int:
        """Colourings of a cycle of this many beads, with different neighbours if ``proper``."""
        return (colours - 1) ** length + (-1) ** length * (colours - 1) if proper else colours**length

    # Burnside: the mean over all symmetries of the number of colourings that each fixes.
    total = sum(count_cycle(gcd(beads, shift)) for shift in range(beads))
    if not mirrored:
        return total // beads

    def count_axis(ends: int) -> int:
        """Colourings that a reflection fixes; an axis through a gap makes neighbours equal."""
        if proper:
            return 0 if ends else colours * (colours - 1) ** (beads // 2)
        return colours ** ((beads + 1) // 2 if ends else beads // 2 + 1)

    if beads % 2:
        total += beads * count_axis(1)
    else:
        total += beads // 2 * (count_axis(0) + (0 if proper else colours ** (beads // 2)))
    return total // (2 * beads)


def code_necklaces(beads: int, colours: int, mirrored: int, proper: int) -> str:
    rows = "(row, row[::-1])" if mirrored else "(row,)"
    rule = "\n    if any(row[i] == row[i - 1] for i in range(n)):\n        continue" if proper else ""
    return f"""\
from itertools import product
n, seen, count = {beads}, set(), 0
for row in product(range({colours}), repeat=n):{rule}
    if row in seen:
        continue
    count += 1
    for r in {rows}:
        seen.update(r[i:] + r[:i] for i in range(n))
print(count)"""


# ---------------------------------------------------------------- partitions


def draw_partitions(dice: Dice, level: int) -> Parameters:
    total = dice.between(*((15, 30), (30, 50), (50, 80))[level - 1])
    return total, dice.between(3, total // 2), dice.below(3)


def describe_partitions(total: int, bound: int, kind: int) -> str:
    rule = (
        f"each of which is at most {bound}",
        f"of which there are at most {bound}",
        f"all different and each at most {bound + total // 3}",
    )[kind]
    return (
        f"In how many ways can {total} be written as a sum of positive integers, {rule}? The order of the summands does"
        " not matter."
    )


def answer_partitions(total: int, bound: int, kind: int) -> int:
    # Conjugation turns a bound on the number of summands into one on their size.
    ways = [1] + [0] * total
    for part in range(1, (bound + total // 3 if kind == 2 else bound) + 1):
        amounts = range(total, part - 1, -1) if kind == 2 else range(part, total + 1)
        for amount in amounts:
            ways[amount] += ways[amount - part]
    return ways[total]


def code_partitions(total: int, bound: int, kind: int) -> str:
    head = "from functools import lru_cache\n\n@lru_cache(None)\n"
    if kind == 1:
        return f"""\
{head}def count(left, largest, parts):
    if left == 0:
        return 1
    if parts == 0:
        return 0
    return sum(count(left - part, part, parts - 1) for part in range(1, min(left, largest) + 1))

print(count({total}, {total}, {bound}))"""
    step = "part - 1" if kind == 2 else "part"
    largest = bound + total // 3 if kind == 2 else bound
    return f"""\
{head}def count(left, largest):
    if left == 0:
        return 1
    return sum(count(left - part, {step}) for part in range(1, min(left, largest) + 1))

print(count({total}, {largest}))"""


# ---------------------------------------------------------------- permutations with forbidden places


def draw_permutations(dice: Dice, level: int) -> Parameters:
    size = dice.between(5, 6) if level == 1 else level + 5
    return size, dice.between(2, size - 2), dice.between(0, size), dice.between(1, size - 1)


def describe_permutations(size: int, reach: int, fixed: int, edge: int) -> str:
    rules = [f"$|p_i - i| \\le {reach}$ for every $i$"]
    if fixed:
        rules.append(f"$p_i \\ne i$ for $1 \\le i \\le {fixed}$")
    rules.append(f"$p_1 \\ne {edge + 1}$")
    return f"How many permutations $(p_1, \\ldots, p_{size})$ of $1, \\ldots, {size}$ satisfy {' and '.join(rules)}?"


def answer_permutations(size: int, reach: int, fixed: int, edge: int) -> int:
    ways = {0: 1}  # by the set of values of the first places
    for place in range(size):
        following: dict[int, int] = {}
        for taken, count in ways.items():
            for value in range(size):
                free = not taken >> value & 1 and abs(value - place) <= reach
                if free and not (value == place and place < fixed) and not (place == 0 and value == edge):
                    following[taken | 1 << value] = following.get(taken | 1 << value, 0) + count
        ways = following
    return sum(ways.values())


def code_permutations(size: int, reach: int, fixed: int, edge: int) -> str:
    return f"""\
from itertools import permutations
count = 0
for p in permutations(range({size})):
    if p[0] == {edge} or any(p[i] == i for i in range({fixed})):
        continue
    count += all(abs(p[i] - i) <= {reach} for i in range({size}))
print(count)"""


# ---------------------------------------------------------------- digits


def draw_digits(dice: Dice, level: int) -> Parameters:
    high = (2_000, 20_000, 200_000)[level - 1]
    low = dice.between(1, high // 3)
    return low, dice.between(high // 2, high), dice.between(5, 12 + 5 * level), dice.between(2, 3 + 3 * level)


def describe_digits(low: int, high: int, total: int, divisor: int) -> str:
    return (
        f"How many integers from {low} to {high} (both included) are divisible by {divisor} and have the digit sum"
        f" {total}?"
    )


def answer_digits(low: int, high: int, total: int, divisor: int) -> int:
    def count_below(stop: int) -> int:
        """Numbers in [0, stop) of this digit sum and divisibility, digit by digit."""
        ways: dict[tuple[int, int], int] = {}
        prefix_sum = prefix = 0
        for digit in map(int, str(stop)):
            following: dict[tuple[int, int], int] = {}
            for (digits, remainder), count in ways.items():
                for further in range(10):
                    key = digits + further, (remainder * 10 + further) % divisor
                    following[key] = following.get(key, 0) + count
            for smaller in range(digit):
                key = prefix_sum + smaller, (prefix * 10 + smaller) % divisor
                following[key] = following.get(key, 0) + 1
            prefix_sum, prefix, ways = prefix_sum + digit, prefix * 10 + digit, following
        return ways.get((total, 0), 0)

    return count_below(high + 1) - count_below(low)


def code_digits(low: int, high: int, total: int, divisor: int) -> str:
    return f"""\
count = 0
for n in range({low}, {high} + 1):
    if n % {divisor} == 0 and sum(map(int, str(n))) == {total}:
        count += 1
print(count)"""


# ---------------------------------------------------------------- dice


def draw_rolls(dice: Dice, level: int) -> Parameters:
    faces, rolls = dice.between(3, 12), (2, 3, 4)[level - 1]
    return faces + (8 if level == 1 else 0), rolls, dice.below(3), dice.between(1, 4)


def describe_rolls(faces: int, rolls: int, kind: int, power: int) -> str:
    value = ("largest", "smallest", "second largest")[kind]
    raised = {1: "", 2: "the square of ", 3: "the cube of ", 4: "the fourth power of "}[power]
    return (
        f"A fair die with the faces 1 to {faces} is rolled {rolls} times. Let $E$ be the expected value of {raised}the"
        f" {value} number rolled (a number that is rolled twice counts twice). What is ${faces}^{rolls} \\cdot E$?"
    )


def answer_rolls(faces: int, rolls: int, kind: int, power: int) -> int:
    def count_at_most(value: int) -> int:
        """Outcomes whose number in question is at most ``value``."""
        if kind == 1:
            return faces**rolls - (faces - value) ** rolls
        one_above = rolls * (faces - value) * value ** (rolls - 1) if kind == 2 else 0
        return value**rolls + one_above

    return sum(value**power * (count_at_most(value) - count_at_most(value - 1)) for value in range(1, faces + 1))


def code_rolls(faces: int, rolls: int, kind: int, power: int) -> str:
    place = ("-1", "0", "-2")[kind]
    return f"""\
from itertools import product
print(sum(sorted(roll)[{place}] ** {power} for roll in product(range(1, {faces} + 1), repeat={rolls})))"""


FAMILIES = (
    Family("lattice_paths", draw_paths, describe_paths, answer_paths, code_paths),
    Family("necklaces", draw_necklaces, describe_necklaces, answer_necklaces, code_necklaces),
    Family("partitions", draw_partitions, describe_partitions, answer_partitions, code_partitions),
    Family("permutations", draw_permutations, describe_permutations, answer_permutations, code_permutations),
    Family("digit_sums", draw_digits, describe_digits, answer_digits, code_digits),
    Family("expected_values", draw_rolls, describe_rolls, answer_rolls, code_rolls),
)
