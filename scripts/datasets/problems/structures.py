"""Families of problems about sequences, lattice points, triangles, walks on graphs and circles of people."""

from __future__ import annotations

from math import comb, gcd, isqrt

from problems.family import Family, Parameters
from spear_envs.core.dice import Dice

# ---------------------------------------------------------------- linear recurrences


def draw_recurrence(dice: Dice, level: int) -> Parameters:
    index = dice.between(*((20, 60), (500, 5_000), (20_000, 100_000))[level - 1])
    starts = dice.between(0, 9), dice.between(1, 9)
    factors = dice.between(1, 9), dice.between(1, 9), 0 if level == 1 else dice.between(1, 20)
    return (*starts, *factors, index, dice.between(97, 997))


def describe_recurrence(x0: int, x1: int, a: int, b: int, c: int, index: int, modulus: int) -> str:
    first, second = "" if a == 1 else f"{a}", "" if b == 1 else f"{b}"
    constant = f" + {c}" if c else ""
    return (
        f"A sequence begins with $x_0 = {x0}$, $x_1 = {x1}$, and $x_{{n}} = {first}x_{{n-1}} + {second}x_{{n-2}}"
        f"{constant}$ for $n \\ge 2$. What is the remainder when $x_{{{index}}}$ is divided by {modulus}?"
    )


def answer_recurrence(x0: int, x1: int, a: int, b: int, c: int, index: int, modulus: int) -> int:
    def multiply(left: list[list[int]], right: list[list[int]]) -> list[list[int]]:
        return [
            [sum(x * y for x, y in zip(row, column, strict=True)) % modulus for column in zip(*right, strict=True)]
            for row in left
        ]

    result = [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    step = [[a, b, c], [1, 0, 0], [0, 0, 1]]
    exponent = index - 1
    while exponent:
        if exponent & 1:
            result = multiply(result, step)
        step = multiply(step, step)
        exponent >>= 1
    return (result[0][0] * x1 + result[0][1] * x0 + result[0][2]) % modulus


def code_recurrence(x0: int, x1: int, a: int, b: int, c: int, index: int, modulus: int) -> str:
    return f"""\
x, y = {x0}, {x1}
for n in range(2, {index} + 1):
    x, y = y, ({a} * y + {b} * x + {c}) % {modulus}
print(y % {modulus})"""


# ---------------------------------------------------------------- lattice points in ellipses and rings


def draw_circle(dice: Dice, level: int) -> Parameters:
    outer = dice.between(*((50, 400), (400, 3_000), (3_000, 20_000))[level - 1])
    weight = 1 if level == 1 else dice.between(1, 7)
    return weight, (0 if level < 3 else dice.between(100, outer // 2)), outer


def describe_circle(weight: int, inner: int, outer: int) -> str:
    form = "x^2 + y^2" if weight == 1 else f"x^2 + {weight}y^2"
    bounds = f"{form} \\le {outer}" if not inner else f"{inner} < {form} \\le {outer}"
    return f"How many points $(x, y)$ with integer coordinates satisfy ${bounds}$?"


def answer_circle(weight: int, inner: int, outer: int) -> int:
    def count(radius: int) -> int:
        height = isqrt(radius // weight)
        return sum(2 * isqrt(radius - weight * y * y) + 1 for y in range(-height, height + 1))

    return count(outer) - (count(inner) if inner else 0)


def code_circle(weight: int, inner: int, outer: int) -> str:
    low = f"{inner} < " if inner else ""
    return f"""\
r = int({outer} ** 0.5) + 1
print(sum({low}x * x + {weight} * y * y <= {outer} for x in range(-r, r + 1) for y in range(-r, r + 1)))"""


# ---------------------------------------------------------------- lattice points inside triangles


def draw_inside(dice: Dice, level: int) -> Parameters:
    size = (15, 40, 90)[level - 1]
    return tuple(dice.between(0, size) for _ in range(6))


def describe_inside(*corners: int) -> str:
    listed = [f"$({x}, {y})$" for x, y in zip(corners[::2], corners[1::2], strict=True)]
    return (
        f"A triangle has the corners {listed[0]}, {listed[1]} and {listed[2]}. How many points with integer coordinates"
        " lie strictly inside it?"
    )


def answer_inside(ax: int, ay: int, bx: int, by: int, cx: int, cy: int) -> int:
    double = abs((bx - ax) * (cy - ay) - (cx - ax) * (by - ay))
    border = gcd(bx - ax, by - ay) + gcd(cx - bx, cy - by) + gcd(ax - cx, ay - cy)
    return (double - border + 2) // 2 if double else 0  # Pick


def code_inside(ax: int, ay: int, bx: int, by: int, cx: int, cy: int) -> str:
    return f"""\
A, B, C = ({ax}, {ay}), ({bx}, {by}), ({cx}, {cy})

def side(p, q, x, y):
    return (q[0] - p[0]) * (y - p[1]) - (q[1] - p[1]) * (x - p[0])

count = 0
for x in range(min(A[0], B[0], C[0]), max(A[0], B[0], C[0]) + 1):
    for y in range(min(A[1], B[1], C[1]), max(A[1], B[1], C[1]) + 1):
        a, b, c = side(A, B, x, y), side(B, C, x, y), side(C, A, x, y)
        count += (a > 0 and b > 0 and c > 0) or (a < 0 and b < 0 and c < 0)
print(count)"""


# ---------------------------------------------------------------- independent sets of cycles and paths


def draw_choices(dice: Dice, level: int) -> Parameters:
    people, chosen = (((8, 16), (2, 4)), ((13, 20), (3, 5)), ((18, 26), (3, 6)))[level - 1]
    return dice.between(*people), dice.between(*chosen), dice.between(1, 2), dice.below(2)


def describe_choices(people: int, chosen: int, gap: int, closed: int) -> str:
    where = "around a table" if closed else "in a row"
    between = "is always at least one who is" if gap == 1 else "are always at least two who are"
    either = ", on either way around the table" if closed else ""
    return (
        f"{people} people sit {where}. In how many ways can {chosen} of them be chosen so that between any two chosen"
        f" people there {between} not chosen{either}?"
    )


def answer_choices(people: int, chosen: int, gap: int, closed: int) -> int:
    if closed:
        free = people - gap * chosen
        return people * comb(free, chosen) // free if free >= chosen else 0
    free = people - gap * (chosen - 1)
    return comb(free, chosen) if free >= chosen else 0


def code_choices(people: int, chosen: int, gap: int, closed: int) -> str:
    around = f" and c[0] + {people} - c[-1] > {gap}" if closed else ""
    return f"""\
from itertools import combinations
count = 0
for c in combinations(range({people}), {chosen}):
    if all(b - a > {gap} for a, b in zip(c, c[1:])){around}:
        count += 1
print(count)"""


# ---------------------------------------------------------------- triangles with integer sides (test split only)


def draw_triangles(dice: Dice, level: int) -> Parameters:
    return dice.between(*((20, 60), (60, 130), (130, 250))[level - 1]), dice.between(0, level)


def describe_triangles(bound: int, kind: int) -> str:
    rule = ("", " and three different sides", " and at least two equal sides", " and an obtuse angle")[kind]
    return f"How many triangles with sides of integer length, the perimeter {bound}{rule} are there, up to congruence?"


def answer_triangles(bound: int, kind: int) -> int:
    every = (bound * bound + 24) // 48 if bound % 2 == 0 else ((bound + 3) ** 2 + 24) // 48
    legs = range(bound // 4 + 1, (bound + 1) // 2)  # equal sides a with 2a > bound - 2a > 0
    equal = len(legs)
    if kind == 0:
        return every
    if kind == 1:
        return every - equal
    if kind == 2:
        return equal
    total = 0
    for longest in range((bound + 2) // 3, (bound + 1) // 2):
        rest = bound - longest
        # The shorter sides are a and rest - a; obtuse where a^2 + (rest - a)^2 < longest^2.
        for short in range(max(1, rest - longest), rest // 2 + 1):
            total += 2 * short * short - 2 * rest * short + rest * rest < longest * longest
    return total


def code_triangles(bound: int, kind: int) -> str:
    rule = ("True", "a < b < c", "a == b or b == c", "a * a + b * b < c * c")[kind]
    return f"""\
count = 0
for a in range(1, {bound}):
    for b in range(a, {bound} - a):
        c = {bound} - a - b
        if b <= c < a + b and ({rule}):
            count += 1
print(count)"""


# ---------------------------------------------------------------- walks on circulant graphs (test split only)


def draw_walks(dice: Dice, level: int) -> Parameters:
    size = dice.between(*((6, 9), (9, 14), (12, 20))[level - 1])
    near, far = sorted(dice.sample(range(1, (size - 1) // 2 + 1), 2))
    return size, near, far, dice.between(3 + level, 5 + 2 * level), dice.between(0, size - 1)


def describe_walks(size: int, near: int, far: int, steps: int, end: int) -> str:
    return (
        f"A graph has the vertices $0, 1, \\ldots, {size - 1}$; two of them are joined if they differ by {near} or"
        f" {far} modulo {size}. How many walks of exactly {steps} steps lead from vertex 0 to vertex {end}?"
    )


def answer_walks(size: int, near: int, far: int, steps: int, end: int) -> int:
    total = 0
    for long in range(steps + 1):  # number of steps of the second kind, and how many of each kind go forward
        for forward in range(long + 1):
            for other in range(steps - long + 1):
                place = far * (2 * forward - long) + near * (2 * other - (steps - long))
                if (place - end) % size == 0:
                    total += comb(steps, long) * comb(long, forward) * comb(steps - long, other)
    return total


def code_walks(size: int, near: int, far: int, steps: int, end: int) -> str:
    return f"""\
n, ways = {size}, [1] + [0] * ({size} - 1)
for _ in range({steps}):
    ways = [sum(ways[(i + d) % n] for d in (-{far}, -{near}, {near}, {far})) for i in range(n)]
print(ways[{end}])"""


# ---------------------------------------------------------------- the last one in the circle (test split only)


def draw_last(dice: Dice, level: int) -> Parameters:
    return dice.between(*((40, 150), (150, 1_500), (1_500, 9_000))[level - 1]), dice.between(3, 4 + 10 * level)


def describe_last(people: int, count: int) -> str:
    return (
        f"{people} people stand in a circle, numbered 1 to {people} in order. Counting begins with person 1, and every"
        f" {count}th person still in the circle steps out, until one is left. Which number has the last person?"
    )


def answer_last(people: int, count: int) -> int:
    place = 0
    for size in range(2, people + 1):
        place = (place + count) % size
    return place + 1


def code_last(people: int, count: int) -> str:
    return f"""\
circle, place = list(range(1, {people} + 1)), 0
while len(circle) > 1:
    place = (place + {count} - 1) % len(circle)
    circle.pop(place)
print(circle[0])"""


FAMILIES = (
    Family("recurrences", draw_recurrence, describe_recurrence, answer_recurrence, code_recurrence),
    Family("lattice_points", draw_circle, describe_circle, answer_circle, code_circle),
    Family("triangle_points", draw_inside, describe_inside, answer_inside, code_inside),
    Family("spaced_choices", draw_choices, describe_choices, answer_choices, code_choices),
    Family("triangles", draw_triangles, describe_triangles, answer_triangles, code_triangles, only_test=True),
    Family("walks", draw_walks, describe_walks, answer_walks, code_walks, only_test=True),
    Family("last_in_circle", draw_last, describe_last, answer_last, code_last, only_test=True),
)
