"""Codes of sparse ternary vectors, against Algorithms 3 and 4 of the paper, bit by bit."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedquilt.federation.golomb import (
    HEADER,
    Ternary,
    bits_per_position,
    decode,
    encode,
    max_entries,
    remainder_bits,
)


def words(positions, b):
    """Algorithm 3: for every position the unary and the binary part of its gap."""
    found, before = [], -1
    for position in positions:
        q, r = divmod(position - before - 1, 2**b)
        found.append(("1" * q + "0", f"{r:b}".zfill(b) if b else ""))
        before = position
    return found


def read_words(message, b):
    """Algorithm 4: the positions in a message of words."""
    found, position, q, i = [], -1, 0, 0
    while i < len(message):
        if message[i] == "1":
            q, i = q + 1, i + 1
        else:
            position += q * 2**b + int(message[i + 1 : i + 1 + b] or "0", 2) + 1
            found.append(position)
            q, i = 0, i + 1 + b
    return found


def bits_of(code):
    return "".join(f"{byte:08b}" for byte in code[HEADER.itemsize :])


@st.composite
def vectors(draw):
    """A sparse ternary vector, its size and the sparsity agreed on."""
    size = draw(st.integers(1, 150))
    sparsity = draw(st.sampled_from([1e-9, 1 / 400, 0.02, 0.1, 0.3, 0.39, 0.7, 1.0]))
    most = max(1, math.floor(size * sparsity))
    positions = sorted(draw(st.sets(st.integers(0, size - 1), max_size=most)))
    signs = draw(st.lists(st.booleans(), min_size=len(positions), max_size=len(positions)))
    magnitude = draw(st.floats(0, 2.0**100, width=32))
    ternary = Ternary(np.array(positions, np.int64), np.array(signs, bool), np.float32(magnitude))
    return ternary, size, sparsity


@given(vectors())
def test_codes_are_the_words_of_the_paper_and_read_back(drawn):
    ternary, size, sparsity = drawn
    code = encode(ternary, size, sparsity)
    b = remainder_bits(max(sparsity, 1 / size))
    found = words(ternary.positions.tolist(), b)
    assert read_words("".join(q + r for q, r in found), b) == ternary.positions.tolist()
    signs = "".join("1" if negative else "0" for negative in ternary.is_negative)
    expected = "".join(q for q, _ in found) + "".join(r for _, r in found) + signs
    assert bits_of(code) == expected.ljust(-(-len(expected) // 8) * 8, "0")
    again = decode(code, size, sparsity)
    assert again.positions.tolist() == ternary.positions.tolist()
    assert again.is_negative.tolist() == ternary.is_negative.tolist()
    assert again.magnitude == ternary.magnitude
    assert again.values.dtype == np.float32


def test_a_code_by_hand():
    ternary = Ternary(np.array([2, 3, 13]), np.array([False, True, True]), np.float32(1.5))
    # p = 0.3: b = 1. Gaps - 1 are 2, 0, 9 = 2 * (1, 0, 4) + (0, 0, 1)
    code = encode(ternary, 20, 0.3)
    assert code[:8].tobytes() == b"\x03\0\0\0" + np.float32(1.5).tobytes()
    assert bits_of(code) == "10" + "0" + "11110" + "001" + "011" + "00"


@pytest.mark.parametrize("sparsity", [0.5 ** (k / 4) for k in range(1, 60)])
def test_no_other_number_of_bits_is_shorter_on_average(sparsity):
    def expected(b):
        quotients = np.arange(2 + math.ceil(50 / (sparsity * 2**b)))
        return b + ((1 - sparsity) ** (2.0**b * quotients)).sum()  # P(unary part > q), summed

    b = remainder_bits(sparsity)
    assert bits_per_position(sparsity) == pytest.approx(expected(b))
    assert all(expected(b) <= expected(other) + 1e-9 for other in (b + 1, max(b - 1, 0)))


@pytest.mark.parametrize("sparsity", [1 / 400, 1 / 100, 1 / 25, 1 / 20])
def test_codes_are_as_long_as_the_formula_says(sparsity):
    draw, size = np.random.default_rng(0), 2_000_000
    count = max_entries(size, sparsity)
    positions = np.sort(draw.choice(size, count, replace=False))
    code = encode(Ternary(positions, draw.random(count) < 0.5, np.float32(1)), size, sparsity)
    per_position = (8 * (len(code) - HEADER.itemsize) - count) / count
    assert per_position == pytest.approx(bits_per_position(sparsity), rel=0.01)


@given(vectors(), st.data())
def test_a_code_that_is_cut_or_longer_is_refused(drawn, data):
    ternary, size, sparsity = drawn
    code = encode(ternary, size, sparsity)
    shorter = code[: data.draw(st.integers(0, len(code) - 1))]
    with pytest.raises(ValueError, match="too short"):
        decode(shorter, size, sparsity)
    behind = np.full(data.draw(st.integers(1, 5)), data.draw(st.sampled_from([0, 255])), np.uint8)
    with pytest.raises(ValueError, match="too long"):
        decode(np.concatenate([code, behind]), size, sparsity)


@given(vectors(), st.binary(max_size=60), st.integers(0, 500))
def test_what_is_read_from_any_bytes_is_what_they_are_the_code_of(drawn, noise, place):
    ternary, size, sparsity = drawn
    code = encode(ternary, size, sparsity)
    damaged = code.copy()
    damaged[place % len(code)] ^= 1 + place % 255
    for some in (damaged, np.frombuffer(noise, np.uint8)):
        try:
            found = decode(some, size, sparsity)
        except ValueError:
            continue
        assert len(found.positions) <= max_entries(size, sparsity)
        assert (np.diff(found.positions) > 0).all()
        assert all(0 <= position < size for position in found.positions)
        assert np.isfinite(found.magnitude)
        assert encode(found, size, sparsity).tobytes() == some.tobytes()


def header(count, magnitude):
    return np.array([(count, magnitude)], HEADER).view(np.uint8)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (header(11, 1.0), "too long: it has 11 entries, and 10 were asked for"),
        (header(2**32 - 1, 1.0), "too long"),
        (np.concatenate([header(1, 1.0), np.full(10**7, 255, np.uint8)]), "too long"),
        (np.concatenate([header(1, 1.0), [255, 255, 255]]), "too short"),
        (header(0, math.inf), "magnitude inf, which is not finite"),
        (header(0, -1.0), "magnitude -1.0, which is not finite or not positive"),
        (np.concatenate([header(1, 1.0), [0b10000000, 0b00000001]]), "behind its end"),
        (np.concatenate([header(1, 1.0), [255, 254, 252]]), "position 1023 of 1000"),
    ],
)
def test_a_code_that_is_none_is_refused_and_takes_no_memory(code, message):
    code = code.astype(np.uint8)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=message):
            decode(code, 1000, 0.01)
        assert tracemalloc.get_traced_memory()[1] < 50_000
    finally:
        tracemalloc.stop()


def test_a_vector_without_entries_has_a_code():
    empty = Ternary(np.zeros(0, np.int64), np.zeros(0, bool), np.float32(0))
    for size in (0, 1, 100):
        code = encode(empty, size, 0.01)
        assert len(code) == HEADER.itemsize
        assert len(decode(code, size, 0.01).positions) == 0
