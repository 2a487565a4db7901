"""Which updates are accepted."""

from __future__ import annotations

import pytest
import torch

from fedquilt.errors import UpdateError
from fedquilt.federation.client import Update
from fedquilt.federation.update import MAX_VALUE, validate_update
from fedquilt.structure.cut import copy_subnet_tensors
from fedquilt.structure.subnet import Subnet

NARROW = Subnet.from_channels({"h": [0, 3], "y": [1]}).excluding("b")


def good(params, structure, subnet=NARROW, weight=1.0) -> Update:
    return Update(4, (subnet,), (copy_subnet_tensors(params, structure, subnet),), weight, {})


def test_what_was_asked_for_is_accepted_as_it_is(params, structure):
    for subnet in (NARROW, Subnet(), NARROW.with_private("x", "a"), Subnet(excluded=("*",))):
        update = good(params, structure, subnet, weight=0.0)
        assert validate_update(update, structure, params) is update


def test_values_are_refused_of_which_a_sum_may_overflow_and_no_others(params, structure):
    update = good(params, structure)
    update.params[0]["a"].fill_(-MAX_VALUE)
    assert update.params[0]["a"].norm() > MAX_VALUE
    assert validate_update(update, structure, params) is update
    update.params[0]["a"][1, 2] = 2 * MAX_VALUE
    with pytest.raises(UpdateError, match=r"client 4 sent 'a' with values up to 2e\+18"):
        validate_update(update, structure, params)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_value_that_is_not_finite_is_enough(params, structure, value):
    update = good(params, structure)
    update.params[0]["a"][1, 2] = value
    with pytest.raises(UpdateError, match="client 4 sent 'a' with values that are not finite"):
        validate_update(update, structure, params)


def test_infinities_that_cancel_are_seen(params, structure):
    update = good(params, structure)
    update.params[0]["a"][0, :2] = torch.tensor([float("inf"), float("-inf")])
    with pytest.raises(UpdateError, match="not finite"):
        validate_update(update, structure, params)


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -1.0])
def test_weights_are_finite_and_not_negative(params, structure, weight):
    with pytest.raises(UpdateError, match="client 4 sent the weight"):
        validate_update(good(params, structure, weight=weight), structure, params)


def changed(update: Update, **tensors) -> Update:
    merged = {**update.params[0], **tensors}
    kept = {n: t for n, t in merged.items() if t is not None}
    return Update(update.client, update.subnets, (kept,), 1.0, {})


def test_names_shapes_and_types_are_the_subnets(params, structure):
    update = good(params, structure)
    for bad, said in (
        (changed(update, free=None), "differ in: free"),
        (changed(update, b=torch.zeros(4, 5, 2)), "differ in: b"),
        (changed(update, a=torch.zeros(3, 3)), r"shape \(3, 3\), its subnet has \(2, 3\)"),
        (changed(update, a=torch.zeros(3, 2)), r"shape \(3, 2\)"),
        (changed(update, scalar=torch.zeros(1)), r"shape \(1,\)"),
        (changed(update, a=torch.zeros(2, 3, dtype=torch.int64)), "'a' as torch.int64"),
        (changed(update, a=torch.zeros(2, 3, dtype=torch.float64)), "'a' as torch.float64"),
    ):
        with pytest.raises(UpdateError, match=f"client 4 .*{said}"):
            validate_update(bad, structure, params)


@pytest.mark.parametrize(
    "subnet",
    [Subnet.from_channels({"z": [0]}), Subnet((("h", 0),)), Subnet.from_channels({"h": [5]})],
)
def test_a_subnet_that_does_not_fit_is_refused(params, structure, subnet):
    update = Update(4, (subnet,), (dict(params),), 1.0, {})
    with pytest.raises(UpdateError, match="client 4 sent a subnet that does not fit"):
        validate_update(update, structure, params)


def test_every_subnet_needs_its_tensors(params, structure):
    update = Update(4, (NARROW, NARROW), (copy_subnet_tensors(params, structure, NARROW),), 1.0, {})
    with pytest.raises(UpdateError, match="1 sets of tensors for 2 subnets"):
        validate_update(update, structure, params)


def owned(params, *owners) -> dict:
    """A model all of whose tensors belong to owners, as Split-Mix's bases do."""
    return {f"{n}@{owner}": t for owner in owners for n, t in params.items()}


BASES = tuple(Subnet().with_private(owner, "*") for owner in ("0", "1", "2"))


def several(params, structure) -> Update:
    parts = tuple(
        copy_subnet_tensors(owned(params, "0", "1", "2"), structure, base) for base in BASES
    )
    return Update(4, BASES, parts, 1.0, {})


def test_every_one_of_several_subnets_is_looked_at(params, structure):
    given = owned(params, "0", "1", "2")
    update = several(params, structure)
    assert validate_update(update, structure, given) is update
    for number in range(3):
        bad = several(params, structure)
        bad.params[number]["a"][1, 2] = float("nan")
        with pytest.raises(UpdateError, match="client 4 sent 'a' with values that are not finite"):
            validate_update(bad, structure, given)
        bad = several(params, structure)
        del bad.params[number]["free"]
        with pytest.raises(UpdateError, match="differ in: free"):
            validate_update(bad, structure, given)
        bad = several(params, structure)
        bad.params[number]["a"] = bad.params[number]["a"].double()
        with pytest.raises(UpdateError, match=r"'a' as torch\.float64, the model has"):
            validate_update(bad, structure, given)


@pytest.mark.parametrize("subnet", [Subnet(), Subnet().with_private("3", "*")])
def test_tensors_of_an_owner_that_is_not_there_are_refused(params, structure, subnet):
    """Where nothing is shared there is nothing that a new owner could start from."""
    update = Update(4, (subnet,), (dict(params),), 1.0, {})
    with pytest.raises(
        UpdateError, match=f"sent 'a' of '{subnet.owner}', which is not in the model"
    ):
        validate_update(update, structure, owned(params, "0", "1", "2"))


def test_an_owners_first_tensors_are_checked_against_the_shared_ones(params, structure):
    subnet = Subnet().with_private("new", "a")
    update = good(params, structure, subnet)
    assert validate_update(update, structure, params) is update
    wrong = changed(update, a=update.params[0]["a"].double())
    with pytest.raises(UpdateError, match=r"'a' as torch\.float64"):
        validate_update(wrong, structure, params)
