from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from fedquilt.data import Examples, Windows
from fedquilt.data.population import make_clients
from fedquilt.errors import DataError
from fedquilt.federation.client import SERVER


def images(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 1, 4, 4, generator=generator), torch.arange(count) % 4


def test_one_set_is_divided_without_loss_and_tested_alike():
    people = make_clients(images(40), test=images(20, 1), partition="classes:2", count=4)
    assert sum(c.num_examples for c in people.clients) == 40
    for client in people.clients:
        assert len(client.labels) == 2
        assert people.train[client.id].label_set == client.labels
        assert set(people.test[client.id].label_set) <= set(client.labels)
    assert len(people.test[SERVER]) == 20
    assert people.has_server_test
    assert people.testers == (0, 1, 2, 3)


def test_a_list_gives_every_client_its_own_set():
    sets = [TensorDataset(*images(n, n)) for n in (3, 5, 8)]
    people = make_clients(sets, test=images(6), budgets=[1, 0.5, 0.25])
    assert [c.num_examples for c in people.clients] == [3, 5, 8]
    assert [c.budget.width for c in people.clients] == [1, 0.5, 0.25]
    x, _ = people.train[1].batch(torch.arange(5))
    assert torch.equal(x, sets[1].tensors[0])
    assert people.testers == ()


def test_two_arrays_are_one_set_and_two_sets_are_two_clients():
    x, y = images(12)
    assert len(make_clients((x.numpy(), y.numpy()), count=3).clients) == 3
    assert len(make_clients([TensorDataset(x, y), TensorDataset(x, y)]).clients) == 2


def test_the_seed_decides_the_division():
    def rows(seed):
        people = make_clients(images(30), count=3, seed=seed)
        return people.train[0].batch(torch.arange(10))[0]

    assert torch.equal(rows(1), rows(1))
    assert not torch.equal(rows(1), rows(2))


def test_groups_are_clients_of_their_own():
    ids = np.repeat([7, 8, 9], [4, 4, 2])
    people = make_clients(images(10), partition="natural", groups=(ids, None))
    assert [c.num_examples for c in people.clients] == [4, 4, 2]


# validation


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(0, 99))
def test_the_last_examples_of_every_client_are_its_validation(sizes, hundredths):
    sets = [TensorDataset(*images(n, n)) for n in sizes]
    people = make_clients(sets, validation=hundredths / 100)
    for client, size, own in zip(people.clients, sizes, sets, strict=True):
        held = size * hundredths // 100
        assert client.num_examples == len(people.train[client.id]) == size - held > 0
        assert client.labels == people.train[client.id].label_set
        assert (client.id in people.validation) == (held > 0)
        parts = [p[client.id] for p in (people.train, people.validation) if client.id in p]
        x = torch.cat([part.batch(torch.arange(len(part)))[0] for part in parts])
        assert torch.equal(x, own.tensors[0])


def test_clients_know_the_classes_they_train_on_only():
    x, _ = images(4)
    people = make_clients([TensorDataset(x, torch.tensor([0, 1, 2, 3]))], validation=0.5)
    assert people.clients[0].labels == (0, 1)
    assert people.validation[0].label_set == (2, 3)


def test_one_set_is_divided_first_and_held_back_then():
    ids = np.tile([0, 1], 10)
    options = {"partition": "domain:blocks", "count": 4, "groups": (ids, ids)}
    whole = make_clients(images(20), test=images(20, 1), **options)
    people = make_clients(images(20), test=images(20, 1), validation=0.4, **options)
    for i in range(4):
        before, _ = whole.train[i].batch(torch.arange(5))
        assert torch.equal(people.train[i].batch(torch.arange(3))[0], before[:3])
        assert torch.equal(people.validation[i].batch(torch.arange(2))[0], before[3:])
        assert torch.equal(people.test[i].labels, whole.test[i].labels)


def test_there_is_a_split_for_validation_only_where_somebody_has_some():
    assert set(make_clients(images(12), count=3).data) == {"train", "test"}
    assert set(make_clients(images(12), count=3, validation=0.1).data) == {"train", "test"}
    people = make_clients(images(12), count=3, validation=0.25)
    assert people.data["validation"] is people.validation
    assert set(people.validation) == {0, 1, 2}


@pytest.mark.parametrize("share", [1, 1.5, -0.1, float("nan")])
def test_a_validation_share_outside_0_to_1_is_refused(share):
    with pytest.raises(DataError, match=r"in \[0, 1\), got .*write 0.1 for a tenth"):
        make_clients(images(12), count=3, validation=share)


# natural clients, unseen clients, and their own test data

NAMES = ("ann", "bob", "cid", "dee", "eve", "fay")


def numbered(count, first=0):
    """Examples whose input is their number."""
    return torch.arange(first, first + count)[:, None], torch.arange(count) % 3


def found(data):
    """The numbers of the examples that somebody holds."""
    return data.batch(torch.arange(len(data)))[0].flatten().tolist()


def by_id(sizes, test_sizes=None, **options):
    """Clients of numbered examples, test examples from 1000 on; and the numbers of each id."""
    counts = (sizes, test_sizes or [0] * len(sizes))
    ids = tuple(np.repeat(np.arange(len(sizes)), own) for own in counts)
    test = numbered(len(ids[1]), 1000) if test_sizes else None
    people = make_clients(
        numbered(len(ids[0])),
        test=test,
        partition="natural",
        groups=(ids[0], ids[1] if test_sizes else None),
        group_names=NAMES[: len(sizes)],
        **options,
    )
    own = {
        name: {
            *np.flatnonzero(ids[0] == i).tolist(),
            *(1000 + np.flatnonzero(ids[1] == i)).tolist(),
        }
        for i, name in enumerate(NAMES[: len(sizes)])
    }
    return people, own


sizes_of_ids = st.lists(st.integers(1, 9), min_size=2, max_size=6)


@given(sizes_of_ids, st.booleans(), st.integers(0, 99), st.integers(0, 99), st.integers(0, 3))
def test_unseen_clients_train_on_nothing_and_everything_is_in_one_place(
    sizes, tested, share, held, seed
):
    options = {"test_fraction": 0.0 if tested else held / 100, "validation": 0.2, "seed": seed}
    count = len(sizes) * share // 100
    if count == 0:
        return
    people, own = by_id(sizes, [n % 3 + 1 for n in sizes] if tested else None,
                        holdout_clients=share / 100, **options)  # fmt: skip
    seen = {c.group for c in people.clients}
    assert len(people.clients) == len(sizes) - count
    assert set(found(people.test[SERVER])) == set().union(*(own[n] for n in own if n not in seen))
    assert len(people.test[SERVER]) == len(set(found(people.test[SERVER])))
    for client in people.clients:
        splits = (people.train, people.test, people.validation)
        held_by = [found(split[client.id]) for split in splits if client.id in split]
        assert sorted(chain(*held_by)) == sorted(own[client.group])  # each once


@given(sizes_of_ids, st.integers(1, 6), st.integers(1, 9), st.integers(0, 3))
def test_some_of_the_natural_clients_take_part_with_their_own_test_data(sizes, count, least, seed):
    large = [n for n, size in zip(NAMES, sizes, strict=False) if size >= least]
    asked = {"count": count, "min_examples": least, "seed": seed}
    if count > len(large):
        with pytest.raises(DataError, match=f"of {len(sizes)} natural clients {len(large)} have"):
            by_id(sizes, **asked)
        return
    people, own = by_id(sizes, [1] * len(sizes), **asked)
    groups = [c.group for c in people.clients]
    assert len(groups) == count
    assert groups == sorted(groups)
    assert set(groups) <= set(large)
    for client in people.clients:
        held = found(people.train[client.id]) + found(people.test[client.id])
        assert sorted(held) == sorted(own[client.group])
    expected = set().union(*(own[name] for name in groups))
    assert set(found(people.test[SERVER])) == {n for n in expected if n >= 1000}


def test_the_seed_draws_who_takes_part_and_who_is_unseen():
    def groups(seed, **options):
        return tuple(c.group for c in by_id([3] * 6, seed=seed, **options)[0].clients)

    for options in ({"count": 3}, {"holdout_clients": 0.5}):
        drawn = [groups(seed, **options) for seed in range(8)]
        assert drawn == [groups(seed, **options) for seed in range(8)]
        assert len(set(drawn)) > 2


def test_all_natural_clients_take_part_unless_somebody_says_how_many():
    assert len(by_id([1, 9, 2])[0].clients) == 3


def test_test_examples_of_nobody_are_the_servers():
    people = make_clients(
        numbered(6), test=numbered(4, 100), partition="natural", groups=([0, 0, 1, 1, 1, 1], None)
    )
    assert people.testers == ()
    assert found(people.test[SERVER]) == [100, 101, 102, 103]
    with pytest.raises(DataError, match=r"test set that is no client's.*leave out holdout_clients"):
        make_clients(
            numbered(6),
            test=numbered(4),
            partition="natural",
            groups=([0, 0, 0, 1, 1, 1], None),
            holdout_clients=0.5,
        )


def test_unseen_clients_may_be_of_any_partition():
    people = make_clients(numbered(40), test=numbered(20, 100), count=4, holdout_clients=0.25)
    assert len(people.clients) == 3
    assert len(people.test[SERVER]) == 15
    held = [found(split[c]) for split in (people.train, people.test) for c in range(3)]
    assert sorted(chain(*held, found(people.test[SERVER]))) == [*range(40), *range(100, 120)]


def test_test_data_are_drawn_although_a_file_is_sorted_by_class():
    x, y = torch.arange(60)[:, None], torch.arange(60) // 20
    people = make_clients([TensorDataset(x, y)], test_fraction=0.5)
    assert people.test[0].label_set == people.train[0].label_set == (0, 1, 2)
    assert found(people.train[0]) == sorted(found(people.train[0]))


def test_test_data_of_a_text_are_its_end():
    windows = Windows(torch.arange(30), torch.arange(20), 5)
    people = make_clients([windows], test_fraction=0.25, validation=0.2)
    held = people.train[0], people.validation[0], people.test[0]
    assert [own.starts.tolist() for own in held] == [
        [*range(12)], [12, 13, 14], [15, 16, 17, 18, 19],
    ]  # fmt: skip


def test_an_empty_test_set_is_nobodys():
    people = make_clients(numbered(6), test=Examples(*numbered(0)), count=2)
    assert not people.has_server_test
    assert people.testers == ()


def test_sequences_are_divided_by_number_or_by_owner_but_not_by_label():
    x = torch.arange(24).view(12, 2)
    people = make_clients((x, x), test=(x, x), count=3)
    assert sorted(chain(*(found(people.train[c]) for c in range(3)))) == [*range(24)]
    assert people.clients[0].labels == people.train[0].label_set
    assert len(make_clients((x, x), partition="natural", groups=([0, 1] * 6, None)).clients) == 2
    for partition in ("classes:2", "dirichlet:0.5"):
        with pytest.raises(DataError, match=f"'{partition}' goes by the label.*'iid' or 'natural'"):
            make_clients((x, x), count=3, partition=partition)


# refusals


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"holdout_clients": 1.0}, r"holdout_clients must be a fraction in \[0, 1\), got 1.0"),
        ({"test_fraction": -0.1}, r"test_fraction must be a fraction in \[0, 1\), got -0.1"),
        ({"holdout_clients": 0.1}, "0.1 of 3 clients is less than one"),
        ({"min_examples": 2}, "min_examples is for natural clients, got 2 with partition 'iid'"),
        ({"test": images(3), "test_fraction": 0.5}, "for clients without test data"),
    ],
)
def test_shares_that_cannot_be_are_refused(options, words):
    with pytest.raises(DataError, match=words):
        make_clients(images(12), count=3, **options)


def test_unseen_clients_are_not_drawn_from_a_list():
    with pytest.raises(DataError, match="one set per client; leave some out"):
        make_clients([TensorDataset(*images(3))] * 4, holdout_clients=0.25)


def test_a_client_without_data_is_refused_by_number():
    with pytest.raises(DataError, match="client 1 has no data"):
        make_clients([TensorDataset(*images(3)), TensorDataset(*images(0))])


def test_test_sets_must_match_the_clients():
    with pytest.raises(DataError, match="2 clients but 1 test sets"):
        make_clients([TensorDataset(*images(3))] * 2, test=[TensorDataset(*images(3))])
