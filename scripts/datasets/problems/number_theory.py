"""Families of problems from number theory."""

from __future__ import annotations

from math import gcd, prod

from problems.family import Family, Parameters
from spear_envs.core.dice import Dice

PRIMES = (2, 3, 5, 7, 11, 13)


def factorize(number: int) -> dict[int, int]:
    """Prime factors with their exponents."""
    factors: dict[int, int] = {}
    prime = 2
    while prime * prime <= number:
        while number % prime == 0:
            factors[prime] = factors.get(prime, 0) + 1
            number //= prime
        prime += 1
    if number > 1:
        factors[number] = factors.get(number, 0) + 1
    return factors


def count_coprime(number: int) -> int:
    """Euler's totient function."""
    for prime in factorize(number):
        number -= number // prime
    return number


# ---------------------------------------------------------------- remainder of a tower of powers


def draw_tower(dice: Dice, level: int) -> Parameters:
    while True:
        base, modulus = dice.between(2, 40), dice.between(101, (300, 2_000, 20_000)[level - 1])
        if gcd(base, modulus) == 1:
            top = (1, dice.between(3, 12), dice.between(7, 50))[level - 1]
            return base, dice.between(30, 400), top, modulus


def describe_tower(base: int, middle: int, top: int, modulus: int) -> str:
    exponent = f"{middle}" if top == 1 else f"{{{middle}^{{{top}}}}}"
    power = f"{base}^{{{exponent}}}" if top == 1 else f"{base}^{exponent}"
    return f"What is the remainder when ${power}$ is divided by {modulus}?"


def answer_tower(base: int, middle: int, top: int, modulus: int) -> int:
    totient = count_coprime(modulus)  # Euler: exponents may be reduced modulo the totient, since the base is coprime
    exponent, result = 1, 1
    for _ in range(top):
        exponent = exponent * middle % totient
    for _ in range(exponent):
        result = result * base % modulus
    return result


def code_tower(base: int, middle: int, top: int, modulus: int) -> str:
    return f"print(pow({base}, {middle} ** {top}, {modulus}))"


# ---------------------------------------------------------------- multiplicative orders


def draw_order(dice: Dice, level: int) -> Parameters:
    low, high = ((100, 400), (400, 3_000), (3_000, 20_000))[level - 1]
    while True:
        base, modulus = dice.between(2, 60), dice.between(low, high)
        if gcd(base, modulus) == 1:
            return base, modulus


def describe_order(base: int, modulus: int) -> str:
    return (
        f"Find the smallest positive integer $k$ such that ${base}^k$ leaves the remainder 1 when it is divided by"
        f" {modulus}."
    )


def answer_order(base: int, modulus: int) -> int:
    order = count_coprime(modulus)
    for prime in factorize(order):
        while order % prime == 0 and pow(base, order // prime, modulus) == 1:
            order //= prime
    return order


def code_order(base: int, modulus: int) -> str:
    return f"""\
k, power = 1, {base} % {modulus}
while power != 1:
    power = power * {base} % {modulus}
    k += 1
print(k)"""


# ---------------------------------------------------------------- numbers with a given greatest common divisor


def draw_totients(dice: Dice, level: int) -> Parameters:
    high = (40, 120, 300)[level - 1]
    low = dice.between(1, high // 2)
    return low, dice.between(low + 5, high), (1, dice.between(1, 3), dice.between(2, 9))[level - 1]


def describe_totients(low: int, high: int, divisor: int) -> str:
    return (
        f"How many pairs of integers $(m, n)$ with $1 \\le m \\le n$ and ${low} \\le n \\le {high}$ have the greatest"
        f" common divisor {divisor}?"
    )


def answer_totients(low: int, high: int, divisor: int) -> int:
    return sum(count_coprime(n // divisor) for n in range(low, high + 1) if n % divisor == 0)


def code_totients(low: int, high: int, divisor: int) -> str:
    return f"""\
from math import gcd
print(sum(gcd(m, n) == {divisor} for n in range({low}, {high} + 1) for m in range(1, n + 1)))"""


# ---------------------------------------------------------------- divisors


def draw_divisors(dice: Dice, level: int) -> Parameters:
    count = (2, 3, 4)[level - 1]
    primes = sorted(dice.sample(PRIMES[: count + 2], count))
    exponents = [dice.between(1, (5, 4, 3)[level - 1]) for _ in primes]
    number = prod(prime**exponent for prime, exponent in zip(primes, exponents, strict=True))
    return number, dice.between(2, 12)


def describe_divisors(number: int, modulus: int) -> str:
    return f"What is the sum of all positive divisors of {number} that are not divisible by {modulus}?"


def answer_divisors(number: int, modulus: int) -> int:
    def add(n: int) -> int:
        return prod((prime ** (k + 1) - 1) // (prime - 1) for prime, k in factorize(n).items())

    # Divisors that are divisible by the modulus are those of the quotient, times the modulus.
    return add(number) - (modulus * add(number // modulus) if number % modulus == 0 else 0)


def code_divisors(number: int, modulus: int) -> str:
    return f"""\
n, total, d = {number}, 0, 1
while d * d <= n:
    if n % d == 0:
        total += sum(e for e in {{d, n // d}} if e % {modulus})
    d += 1
print(total)"""


# ---------------------------------------------------------------- simultaneous remainders


def draw_remainders(dice: Dice, level: int) -> Parameters:
    count, high = ((2, 30), (3, 25), (4, 19))[level - 1]
    while True:
        moduli = sorted(dice.sample(range(5, high), count))
        if all(gcd(a, b) == 1 for i, a in enumerate(moduli) for b in moduli[:i]):
            break
    remainders = [dice.below(modulus) for modulus in moduli]
    return (dice.between(0, 500), *(value for pair in zip(moduli, remainders, strict=True) for value in pair))


def describe_remainders(bound: int, *pairs: int) -> str:
    conditions = [
        f"the remainder {remainder} when it is divided by {modulus}"
        for modulus, remainder in zip(pairs[::2], pairs[1::2], strict=True)
    ]
    listed = ", ".join(conditions[:-1]) + f" and {conditions[-1]}"
    return f"Find the smallest integer greater than {bound} that leaves {listed}."


def answer_remainders(bound: int, *pairs: int) -> int:
    number, step = 0, 1
    for modulus, remainder in zip(pairs[::2], pairs[1::2], strict=True):
        number += step * ((remainder - number) * pow(step, -1, modulus) % modulus)
        step *= modulus
    return number if number > bound else number + ((bound - number) // step + 1) * step


def code_remainders(bound: int, *pairs: int) -> str:
    conditions = " or ".join(
        f"n % {modulus} != {remainder}" for modulus, remainder in zip(pairs[::2], pairs[1::2], strict=True)
    )
    return f"""\
n = {bound} + 1
while {conditions}:
    n += 1
print(n)"""


# ---------------------------------------------------------------- solutions of linear equations


def draw_solutions(dice: Dice, level: int) -> Parameters:
    count, total = ((2, (100, 400)), (3, (40, 120)), (4, (30, 60)))[level - 1]
    return (dice.between(*total), *sorted(dice.between(1, 12) for _ in range(count)))


def describe_solutions(total: int, *weights: int) -> str:
    letters = "abcd"[: len(weights)]
    terms = " + ".join(letter if w == 1 else f"{w}{letter}" for w, letter in zip(weights, letters, strict=True))
    return f"How many solutions does the equation ${terms} = {total}$ have in integers ${', '.join(letters)} \\ge 0$?"


def answer_solutions(total: int, *weights: int) -> int:
    ways = [1] + [0] * total
    for weight in weights:
        for amount in range(weight, total + 1):
            ways[amount] += ways[amount - weight]
    return ways[total]


def code_solutions(total: int, *weights: int) -> str:
    *outer, last = zip("abcd", weights, strict=False)
    lines, left, indent = [], f"{total}", ""
    for letter, weight in outer:
        lines.append(f"{indent}for {letter} in range(({left}) // {weight} + 1):")
        left += f" - {weight} * {letter}"
        indent += "    "
    lines += [f"{indent}count += ({left}) % {last[1]} == 0"]
    return "\n".join(["count = 0", *lines, "print(count)"])


FAMILIES = (
    Family("modular_powers", draw_tower, describe_tower, answer_tower, code_tower),
    Family("multiplicative_orders", draw_order, describe_order, answer_order, code_order),
    Family("common_divisors", draw_totients, describe_totients, answer_totients, code_totients),
    Family("divisor_sums", draw_divisors, describe_divisors, answer_divisors, code_divisors),
    Family("remainders", draw_remainders, describe_remainders, answer_remainders, code_remainders),
    Family("linear_equations", draw_solutions, describe_solutions, answer_solutions, code_solutions),
)
