"""Families for tiny word-level policies: few words, small numbers, and a short program that uses them in order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import factorial, gcd, lcm

from problems.family import LEVELS, Family, Parameters
from spear_envs.core.dice import Dice

LEAST = 2


def draw_within(bounds: tuple[tuple[int, int], ...], alike: int, dice: Dice, level: int) -> Parameters:
    """Draw a number for each pair of bounds; at level 1 from the lower third of the range."""
    numbers = [dice.between(low, low + (high - low) * level // len(LEVELS)) for low, high in bounds]
    return (*sorted(numbers[:alike]), *numbers[alike:])


def make_family(
    name: str, bounds: tuple[tuple[int, int], ...], text: str, answer: Callable[..., int], code: str, alike: int = 0
) -> Family:
    """Make a family whose text and code are patterns with a ``{}`` for each number.

    The first ``alike`` numbers are interchangeable, so they are sorted.
    """
    return Family(name, partial(draw_within, bounds, alike), text.format, answer, code.format, LEAST)


def iterate(start: int, factor: int, term: int, modulus: int, times: int) -> int:
    """The last number of the loop in words."""
    power = pow(factor, times)
    return (start * power + term * (power - 1) // (factor - 1)) % modulus


ONE, TWO = (2, 9), (11, 99)
"""Numbers of one digit and of two."""

FAMILIES = (
    make_family(
        "powers",
        (ONE, ONE, TWO),
        "What is {} to the power {} mod {}?",
        pow,
        "print({}**{}%{})",
    ),
    make_family(
        "squares",
        (ONE, TWO),
        "What is the sum of all squares from {} to {}?",
        lambda a, b: b * (b + 1) * (2 * b + 1) // 6 - (a - 1) * a * (2 * a - 1) // 6,
        "print(sum(i*i for i in range({},{}+1)))",
    ),
    make_family(
        "multiples",
        (ONE, ONE, TWO),
        "How many numbers are divisible by {} or {} and below {}?",
        lambda a, b, n: (n - 1) // a + (n - 1) // b - (n - 1) // lcm(a, b),
        "print(sum(i%{}==0 or i%{}==0 for i in range(1,{})))",
        alike=2,
    ),
    make_family(
        "digits",
        (ONE, TWO),
        "What is the digit sum of {} to the power {}?",
        lambda a, b: sum(int(digit) for digit in f"{a**b}"),
        "print(sum(map(int,str({}**{}))))",
    ),
    make_family(
        "products",
        (TWO, TWO),
        "How many pairs have a product below {} if both numbers are below {}?",
        lambda k, n: sum(min(n - 1, (k - 1) // x) for x in range(1, n)),
        "k,n={},{}\nprint(sum(x*y<k for x in range(1,n) for y in range(1,n)))",
    ),
    make_family(
        "remainders",
        (TWO, TWO),
        "What is the sum of the remainders of {} divided by all numbers below {}?",
        lambda n, k: n * (k - 1) - sum(n // i * i for i in range(1, k)),
        "print(sum({}%i for i in range(1,{})))",
    ),
    make_family(
        "factorials",
        ((5, 24), TWO),
        "What is the factorial of {} mod {}?",
        lambda a, m: factorial(a) % m,
        "import math\nprint(math.factorial({})%{})",
    ),
    make_family(
        "common_multiples",
        (TWO, TWO),
        "What is the least common multiple of {} and {}?",
        lambda a, b: a * b // gcd(a, b),
        "import math\nprint(math.lcm({},{}))",
        alike=2,
    ),
    make_family(
        "coprime",
        (TWO, TWO),
        "How many numbers share no factor with {} and are below {}?",
        lambda k, n: sum(not any(k % d == 0 and i % d == 0 for d in range(2, k + 1)) for i in range(1, n)),
        "import math\nprint(sum(math.gcd(i,{})==1 for i in range(1,{})))",
    ),
    make_family(
        "loops",
        (ONE, ONE, ONE, TWO, TWO),
        "Begin with {}. Take it times {} plus {} mod {}. What comes out after {} times?",
        iterate,
        "x,a,b,m,n={},{},{},{},{}\nfor i in range(n):\n x=(x*a+b)%m\nprint(x)",
    ),
)
