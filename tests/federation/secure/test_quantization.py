"""Changes as integers: sums are exact, and means are right up to the size of a step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedquilt.errors import ProtocolError
from fedquilt.federation.secure.integers import get_dtype
from fedquilt.federation.secure.quantization import Quantizer

changes = st.lists(st.floats(-3, 3, width=32), min_size=4, max_size=4)
weights = st.floats(0, 5)


@settings(max_examples=100)
@given(
    clients=st.lists(st.tuples(changes, weights), min_size=1, max_size=6),
    bits=st.sampled_from([32, 64]),
    rounding=st.sampled_from(["nearest", "stochastic"]),
)
def test_sums_of_integers_are_sums_of_clipped_changes_up_to_a_step_each(clients, bits, rounding):
    quantizer = Quantizer(2.0, 4.0, len(clients), rounding, bits)
    total = np.zeros(6, get_dtype(bits))
    for seed, (change, weight) in enumerate(clients):
        total = total + quantizer.encode(np.array(change), weight, seed)
    sums = quantizer.decode(total, len(clients))
    capped = np.array([min(weight, 4.0) for _, weight in clients])
    step = 4.0 * len(clients) / quantizer.levels
    assert sums.weight == pytest.approx(capped.sum(), abs=step)
    assert sums.num_clipped == sum(abs(x) > 2 for change, _ in clients for x in change)
    expected = capped @ np.clip([change for change, _ in clients], -2, 2)
    np.testing.assert_allclose(sums.change, expected, rtol=0, atol=2 * 2.0 * step)


def test_the_largest_changes_of_all_clients_do_not_wrap_around():
    for count in (1, 3, 50, 1000):
        quantizer = Quantizer(1.0, 1.0, count)
        one = quantizer.encode(np.array([1.0, -1.0]), 1.0, 0)
        total = (one.astype(np.uint64) * np.uint64(count)).astype(get_dtype(32))
        sums = quantizer.decode(total, count)
        np.testing.assert_array_equal(sums.change / sums.weight, [1.0, -1.0])


def test_stochastic_rounding_is_right_on_average_and_repeatable():
    quantizer = Quantizer(1.0, 1.0, 2**29, "stochastic")  # of 3 levels
    change = np.full(20_000, 0.5)
    first = quantizer.encode(change, 1.0, seed=1)
    np.testing.assert_array_equal(first, quantizer.encode(change, 1.0, seed=1))
    assert not np.array_equal(first, quantizer.encode(change, 1.0, seed=2))
    cells = first[:-2].view("<i4")
    assert set(cells.tolist()) == {1, 2}
    assert cells.mean() == pytest.approx(1.5, abs=5 * 0.5 / np.sqrt(20_000))


def test_nothing_changed_means_nothing_changes():
    quantizer = Quantizer(8.0, 1.0, 3, "stochastic")
    total = sum((quantizer.encode(np.zeros(5), 1.0, seed) for seed in range(3)), np.uint32(0))
    assert not quantizer.decode(np.asarray(total, "<u4"), 3).change.any()


@pytest.mark.parametrize("cells", [[0, 7, 6, 0], [0, 0, 2**20, 0], [0, 0, -1, 0], [0, 0, 2, 9]])
def test_sums_that_no_honest_clients_have_are_refused(cells):
    quantizer = Quantizer(1.0, 1.0, 2**20)
    with pytest.raises(ProtocolError, match="a client has not kept to the rules"):
        quantizer.decode(np.array(cells, np.int32).view("<u4"), 2)
