"""Shamir's shares, against a slow oracle that solves for the polynomial."""

from __future__ import annotations

import itertools
import secrets

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedquilt.federation.secure.shamir import PRIME, SHARE_BYTES, recover_secret, split_secret


def solve_for_constant(shares: dict[int, int], threshold: int) -> int:
    """Finds f(0) by Gaussian elimination on f(x) = Σ a_i x^i: slow, and without Lagrange."""
    points = list(shares)[:threshold]
    rows = [[pow(x, i, PRIME) for i in range(threshold)] + [shares[x]] for x in points]
    for column in range(threshold):
        pivot = next(r for r in range(column, threshold) if rows[r][column])
        rows[column], rows[pivot] = rows[pivot], rows[column]
        inverse = pow(rows[column][column], -1, PRIME)
        rows[column] = [value * inverse % PRIME for value in rows[column]]
        for r in range(threshold):
            if r != column:
                factor = rows[r][column]
                pairs = zip(rows[r], rows[column], strict=True)
                rows[r] = [(a - factor * b) % PRIME for a, b in pairs]
    return rows[0][-1]


def is_prime(number: int) -> bool:
    """Miller and Rabin's test, with enough bases to be wrong never in practice."""
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in range(2, 60):
        value = pow(base, odd, number)
        if value in (1, number - 1):
            continue
        if not any((value := value * value % number) == number - 1 for _ in range(twos - 1)):
            return False
    return True


def test_the_modulus_is_the_smallest_prime_above_all_secrets():
    assert is_prime(PRIME)
    assert not any(is_prime(2**128 + offset) for offset in range(1, 51))


@settings(max_examples=30)
@given(secret=st.binary(min_size=16, max_size=16), data=st.data())
def test_any_threshold_shares_give_the_secret_as_solving_for_the_polynomial_does(secret, data):
    points = data.draw(st.lists(st.integers(1, 10**6), min_size=2, max_size=7, unique=True))
    threshold = data.draw(st.integers(1, len(points)))
    shares = split_secret(secret, threshold, points)
    chosen = data.draw(st.permutations(points))[:threshold]
    some = {point: shares[point] for point in chosen}
    assert recover_secret(some, threshold) == secret
    numbers = {point: int.from_bytes(share, "big") for point, share in some.items()}
    assert solve_for_constant(numbers, threshold) == int.from_bytes(secret, "big")


@pytest.mark.parametrize("threshold", [2, 3, 5])
def test_one_share_less_fits_every_secret(threshold):
    """For any other secret there is a polynomial through the same shares."""
    secret, points = secrets.token_bytes(16), range(1, 8)
    shares = split_secret(secret, threshold, points)
    for chosen in itertools.combinations(points, threshold - 1):
        known = {point: int.from_bytes(shares[point], "big") for point in chosen}
        for other in (0, 1, secrets.randbelow(2**128)):
            with_other = {0: other, **known}
            missing = next(x for x in points if x not in chosen)
            value = solve_at(with_other, missing)
            completed = {x: y.to_bytes(SHARE_BYTES, "big") for x, y in known.items()}
            completed[missing] = value.to_bytes(SHARE_BYTES, "big")
            assert int.from_bytes(recover_secret(completed, threshold), "big") == other
        with pytest.raises(ValueError, match=f"{threshold} shares give a secret, there are"):
            recover_secret({point: shares[point] for point in chosen}, threshold)


def solve_at(values: dict[int, int], where: int) -> int:
    """The polynomial through these values, at another point, by Newton's differences."""
    points = list(values)
    table = [values[x] for x in points]
    for depth in range(1, len(points)):
        for i in reversed(range(depth, len(points))):
            step = pow(points[i] - points[i - depth], -1, PRIME)
            table[i] = (table[i] - table[i - 1]) * step % PRIME
    value = 0
    for coefficient, x in zip(reversed(table), reversed(points), strict=True):
        value = (value * (where - x) + coefficient) % PRIME
    return value


def test_a_changed_share_does_not_give_the_secret():
    secret = bytes(15) + b"\1"
    shares = split_secret(secret, 2, [1, 2])
    number = int.from_bytes(shares[1], "big") - 1  # f(0) = 2 f(1) - f(2), so it falls by 2
    changed = {1: (number % PRIME).to_bytes(SHARE_BYTES, "big"), 2: shares[2]}
    with pytest.raises(ValueError, match="not shares of one secret"):
        recover_secret(changed, 2)  # -1 is above all secrets


@pytest.mark.parametrize(
    ("secret", "threshold", "points", "rule"),
    [
        (b"short", 2, [1, 2], "16 bytes"),
        (bytes(16), 3, [1, 2], "threshold of 3"),
        (bytes(16), 2, [1, 1], "different"),
        (bytes(16), 2, [0, 1], "between 0"),
    ],
)
def test_secrets_are_split_within_the_rules(secret, threshold, points, rule):
    with pytest.raises(ValueError, match=rule):
        split_secret(secret, threshold, points)
