"""Laws of the partitions, each checked on drawn labels; oracles; refusals."""

import sys
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from fedquilt.data import (
    Partition,
    from_flwr,
    parse_partition,
    split_by_class,
    split_by_group,
    split_dirichlet,
    split_iid,
)
from fedquilt.data.partition import count_fraction, take_first_rows
from fedquilt.errors import DataError

LABELS = np.arange(600) * 7 % 600 % 10  # sixty of each of ten classes, mixed
FEW = settings(max_examples=60, deadline=None)
seeds = st.integers(0, 2**32)


@st.composite
def labelled(draw, min_examples=1):
    """Labels of up to six classes, with gaps between their numbers, in any order."""
    classes = draw(st.lists(st.integers(0, 50), min_size=1, max_size=6, unique=True))
    sizes = draw(
        st.lists(st.integers(min_examples, 30), min_size=len(classes), max_size=len(classes))
    )
    return np.random.default_rng(draw(seeds)).permutation(np.repeat(classes, sizes))


def assert_each_row_once(rows, num_examples):
    assert np.array_equal(np.sort(np.concatenate(rows)), np.arange(num_examples))
    for own in rows:
        assert own.dtype == np.int64
        assert np.array_equal(own, np.sort(own))


def same(a, b):
    return len(a) == len(b) and all(map(np.array_equal, a, b))


def table(labels, rows):
    """Examples of each class (row) that each client (column) has."""
    return np.array([[np.sum(labels[own] == c) for own in rows] for c in np.unique(labels)])


# laws of every partition


@given(st.integers(1, 300), st.integers(1, 40), seeds)
@FEW
def test_iid_uses_each_row_once_in_equal_parts(num_examples, num_clients, seed):
    assume(num_clients <= num_examples)
    rows = split_iid(num_examples, num_clients, seed)
    assert_each_row_once(rows, num_examples)
    sizes = [len(own) for own in rows]
    assert len(sizes) == num_clients
    assert max(sizes) - min(sizes) <= 1


@given(labelled(), st.integers(1, 20), st.integers(1, 6), seeds)
@example(np.array([0, 0, 0, 1, 2]), 3, 1, 0)
@FEW
def test_by_class_gives_each_client_exactly_its_classes(labels, num_clients, per_client, seed):
    classes, sizes = np.unique(labels, return_counts=True)
    shards = num_clients * per_client
    assume(len(classes) <= shards <= np.minimum(sizes, num_clients).sum())
    assume(per_client <= len(classes) and num_clients <= len(labels))
    rows = split_by_class(labels, num_clients, per_client, seed)
    assert_each_row_once(rows, len(labels))
    counts = table(labels, rows)
    assert np.array_equal((counts > 0).sum(axis=0), np.full(num_clients, per_client))
    for shard_sizes in counts:
        held = shard_sizes[shard_sizes > 0]
        assert held.max() - held.min() <= 1


@given(labelled(min_examples=20), st.integers(1, 20), st.integers(1, 6), seeds)
@FEW
def test_by_class_gives_every_class_equally_many_shards(labels, num_clients, per_client, seed):
    num_classes = len(np.unique(labels))
    assume(per_client <= num_classes <= num_clients * per_client)
    held = (table(labels, split_by_class(labels, num_clients, per_client, seed)) > 0).sum(axis=1)
    assert held.max() - held.min() <= 1


@given(labelled(), st.integers(1, 20), st.floats(1e-3, 1e3), seeds, st.integers(1, 10))
@example(np.zeros(30, int), 3, 20.0, 15, 10)  # the richest has fewer to spare than are missing
@FEW
def test_dirichlet_uses_each_row_once_and_leaves_nobody_poor(labels, count, alpha, seed, minimum):
    assume(count * minimum <= len(labels))
    rows = split_dirichlet(labels, count, alpha, seed, minimum)
    assert_each_row_once(rows, len(labels))
    assert len(rows) == count
    assert min(len(own) for own in rows) >= minimum


@given(labelled(), seeds)
@FEW
def test_natural_ids_are_one_client_each(ids, seed):
    rows = split_by_group(ids, None, seed)
    assert same(rows, [np.flatnonzero(ids == i) for i in np.unique(ids)])


@given(labelled(min_examples=8), st.integers(1, 8), seeds)
@FEW
def test_domains_are_shared_equally_by_neighbours(domains, per_domain, seed):
    present = np.unique(domains)
    rows = split_by_group(domains, per_domain * len(present), seed)
    assert_each_row_once(rows, len(domains))
    for position, domain in enumerate(present):
        block = rows[position * per_domain : (position + 1) * per_domain]
        assert all(set(domains[own]) == {domain} for own in block)
        sizes = [len(own) for own in block]
        assert max(sizes) - min(sizes) <= 1


@given(labelled(min_examples=8), labelled(min_examples=1), st.integers(1, 8), seeds)
@FEW
def test_blocks_follow_each_other_in_the_order_of_the_file(domains, test, per_domain, seed):
    present = np.unique(domains)
    test = test[np.isin(test, present)]
    count = per_domain * len(present)
    rows, test_rows = parse_partition("domain:blocks").split(
        domains, domains, test, test, count, seed
    )
    assert same(rows, split_by_group(domains, count, seed + 1, blocks=True))  # whatever the seed
    for groups, lists in ((domains, rows), (test, test_rows)):
        assert len(lists) == count
        for position, domain in enumerate(present):
            block = lists[position * per_domain : (position + 1) * per_domain]
            assert np.array_equal(np.concatenate(block), np.flatnonzero(groups == domain))
            sizes = [len(own) for own in block]
            assert max(sizes) - min(sizes) <= 1
            assert sizes == sorted(sizes, reverse=True)


def test_blocks_are_not_how_domains_are_dealt_otherwise():
    assert not same(split_by_group(LABELS, 20, 0), split_by_group(LABELS, 20, 0, blocks=True))


def test_three_classes_a_client_are_three_for_all_of_a_hundred_clients():
    labels, test = np.tile(np.arange(10), 1000), np.tile(np.arange(10), 200)
    rows, test_rows = parse_partition("classes:3").split(labels, None, test, None, 100, 1)
    for own, own_test in zip(rows, test_rows, strict=True):
        assert len(set(labels[own])) == 3
        assert set(labels[own]) == set(test[own_test])
    assert {len(own) for own in rows} <= set(range(97, 106))  # 10,000 / 100, shards of 33 or 34


# parts of a set


@given(st.integers(0, 10**6), st.integers(0, 1000))
@example(100, 290)  # 100 * 0.29 is 28.999999999999996
def test_a_part_is_exact_for_shares_as_they_are_written(count, thousandths):
    part = count_fraction(count, thousandths / 1000)
    assert part == Fraction(thousandths, 1000) * count // 1


@given(labelled(min_examples=10), st.integers(1, 10))
@FEW
def test_a_share_keeps_the_first_rows_of_every_group_in_their_order(groups, tenths):
    rows = take_first_rows(groups, tenths / 10)
    expected = [
        row
        for row, group in enumerate(groups)
        if np.sum(groups[:row] == group) < np.sum(groups == group) * tenths // 10
    ]
    assert rows.tolist() == expected


@pytest.mark.parametrize("share", [0, -0.1, 1.01, float("nan")])
def test_a_share_outside_0_to_1_is_refused(share):
    with pytest.raises(DataError, match=r"in \(0, 1\], got .*write 0.3 for 30 %"):
        take_first_rows(LABELS, share)


SPLITS = {
    "iid": lambda seed: split_iid(600, 10, seed),
    "classes": lambda seed: split_by_class(LABELS, 10, 2, seed),
    "published": lambda seed: split_by_class(LABELS, 10, 2, seed, exact=False),
    "dirichlet": lambda seed: split_dirichlet(LABELS, 10, 0.5, seed),
    "domain": lambda seed: split_by_group(LABELS, 20, seed),
}


@pytest.mark.parametrize("kind", SPLITS)
def test_a_seed_decides_the_split(kind):
    split = SPLITS[kind]
    assert same(split(3), split(3))
    assert not same(split(3), split(4))


def test_the_seed_also_decides_who_holds_which_classes():
    def classes(seed):
        return [set(LABELS[own]) for own in split_by_class(LABELS, 10, 2, seed)]

    assert classes(3) != classes(4)


def test_the_seed_also_decides_which_class_has_a_shard_more():
    def shards(seed):
        return tuple((table(LABELS, split_by_class(LABELS, 13, 1, seed)) > 0).sum(axis=1))

    assert len({shards(seed) for seed in range(10)}) > 5


def test_a_class_is_shuffled_before_it_is_dealt():
    labels = np.zeros(100, dtype=np.int64)
    assert not same(split_by_class(labels, 5, 1, 0), split_by_class(labels, 5, 1, 1))


@pytest.mark.parametrize("text", ["iid", "classes:2", "dirichlet:0.5", "domain"])
def test_the_test_rows_are_drawn_apart_from_the_training_rows(text):
    train, test = parse_partition(text).split(LABELS, LABELS, LABELS, LABELS, 20, 0)
    assert not same(train, test)


def test_neighbouring_seeds_do_not_share_their_draws():
    assert not same(
        split_iid(600, 10, 0), Partition("iid").split(LABELS, None, LABELS, None, 10, 1)[1]
    )


def test_labels_are_left_untouched():
    labels = torch.from_numpy(LABELS.copy())
    for split in (split_by_class(labels, 10, 2, 0), split_dirichlet(labels, 10, 0.5, 0)):
        assert_each_row_once(split, 600)
    assert np.array_equal(labels.numpy(), LABELS)


# what is particular to one


def test_by_class_pairs_the_classes_at_random():
    pairs = {tuple(np.unique(LABELS[own])) for own in split_by_class(LABELS, 100, 2, 0)}
    assert len(pairs) > 25  # of 45


def test_by_class_spreads_scarce_classes_over_as_many_clients_as_they_can_serve():
    labels = np.repeat([0, 1, 2], [2, 50, 50])
    counts = table(labels, split_by_class(labels, 10, 2, 0))
    assert (counts[0] > 0).sum() == 2
    assert (counts > 0).sum() == 20


@given(seeds)
@FEW
def test_the_published_split_merges_classes_drawn_twice(seed):
    rows = split_by_class(LABELS, 50, 2, seed, exact=False)
    used = np.concatenate(rows)
    assert len(used) == len(set(used))
    counts = table(LABELS, rows)
    assert set((counts > 0).sum(axis=0)) <= {1, 2}
    assert set(counts[counts > 0]) == {6}  # ten shards of six in every class, held or not
    assert len(used) == 6 * (counts > 0).sum()


def test_the_published_split_leaves_examples_over_where_ours_does_not():
    published = split_by_class(LABELS, 50, 2, 0, exact=False)
    assert sum(map(len, published)) < 600 == sum(map(len, split_by_class(LABELS, 50, 2, 0)))


def test_a_small_alpha_is_uneven_and_a_large_one_even():
    def largest(alpha):
        return table(LABELS, split_dirichlet(LABELS, 10, alpha, 0)).max(axis=1).mean()

    assert largest(0.01) > 50
    assert largest(1e6) <= 7
    assert largest(1e308) <= 7


def test_dirichlet_proportions_have_the_expected_spread():
    labels = np.zeros(10_000, dtype=np.int64)
    parts = [
        [len(own) / 1e4 for own in split_dirichlet(labels, 5, 0.7, seed)] for seed in range(300)
    ]
    alpha, count = 0.7, 5
    variance = (count - 1) / (count**2 * (count * alpha + 1))
    assert np.var(parts) == pytest.approx(variance, rel=0.1)


def test_poor_clients_are_raised_by_the_richest_only():
    labels = np.zeros(1000, dtype=np.int64)
    before = np.array([len(own) for own in split_dirichlet(labels, 20, 0.05, 1, minimum=1)])
    after = np.array([len(own) for own in split_dirichlet(labels, 20, 0.05, 1, minimum=5)])
    rich = before >= 5
    assert (after[~rich] == 5).all()
    untouched = rich & (before < before.max())
    assert np.array_equal(after[untouched], before[untouched])


# the test split follows the training split


@given(labelled(), labelled(), st.integers(1, 8), st.floats(0.01, 10), seeds)
@FEW
def test_no_client_is_tested_on_a_class_it_does_not_train_on(train, test, count, alpha, seed):
    test = test[np.isin(test, train)]
    assume(count <= len(train))
    partition = Partition("dirichlet", alpha)
    rows, test_rows = partition.split(train, None, test, None, count, seed)
    assert_each_row_once(test_rows, len(test))
    assert len(test_rows) == count
    for own, own_test in zip(rows, test_rows, strict=True):
        assert set(test[own_test]) <= set(train[own])


@given(seeds)
@FEW
def test_dirichlet_test_sets_have_the_proportions_of_the_training_sets(seed):
    test = np.tile(np.arange(10), 20)
    rows, test_rows = parse_partition("dirichlet:0.5").split(LABELS, None, test, None, 8, seed)
    assert np.abs(table(test, test_rows) - table(LABELS, rows) / 3).max() < 1


@given(seeds, st.booleans())
@FEW
def test_class_test_sets_have_the_classes_of_the_training_sets(seed, exact):
    test = np.tile(np.arange(10), 15)
    partition = Partition("classes", 2, exact=exact)
    rows, test_rows = partition.split(LABELS, None, test, None, 20, seed)
    for own, own_test in zip(rows, test_rows, strict=True):
        assert set(LABELS[own]) == set(test[own_test])
    held = table(test, test_rows)
    assert held[held > 0].max() - held[held > 0].min() <= 1
    if exact:
        assert_each_row_once(test_rows, len(test))


def test_an_iid_test_set_may_be_smaller_than_the_number_of_clients():
    rows, test_rows = parse_partition("iid").split(LABELS, None, LABELS[:3], None, 10, 0)
    assert_each_row_once(rows, 600)
    assert_each_row_once(test_rows, 3)
    assert len(test_rows) == 10


@pytest.mark.parametrize(("kind", "count"), [("natural", None), ("natural", 10), ("domain", 20)])
def test_group_test_sets_come_from_the_same_group(kind, count):
    groups_test = np.tile(np.arange(9), 5)  # nothing of the tenth
    labels_test = np.zeros(45, dtype=np.int64)
    rows, test_rows = parse_partition(kind).split(
        LABELS, LABELS, labels_test, groups_test, count, 0
    )
    assert_each_row_once(rows, 600)
    assert_each_row_once(test_rows, 45)
    for own, own_test in zip(rows, test_rows, strict=True):
        assert len(set(LABELS[own])) == 1
        assert set(groups_test[own_test]) == set(LABELS[own]) - {9}


@pytest.mark.parametrize(
    ("text", "alone"),
    [
        ("iid", SPLITS["iid"]),
        ("classes:2", SPLITS["classes"]),
        ("dirichlet:0.5", SPLITS["dirichlet"]),
    ],
)
def test_the_training_half_is_what_the_function_alone_gives(text, alone):
    assert same(parse_partition(text).split(LABELS, None, LABELS, None, 10, 7)[0], alone(7))


# parsing


@pytest.mark.parametrize(
    "text", ["iid", "classes:2", "dirichlet:0.123456789", "domain", "domain:blocks", "natural"]
)
def test_parse_and_str_are_inverse(text):
    assert str(parse_partition(text)) == text
    assert parse_partition(str(parse_partition(text))) == parse_partition(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dirichelt:0.5", "partition 'dirichelt'.*did you mean 'dirichlet'"),
        ("", "partition '' is not known; choose one of: classes"),
        ("iid:3", "'iid' takes no number, got 'iid:3'"),
        ("domain:block", "'domain' takes no number, got 'domain:block'"),
        ("classes", "whole number of classes per client, got 'classes'"),
        ("classes:1.5", "whole number"),
        ("classes:0", "whole number"),
        ("classes:-1", "whole number"),
        ("dirichlet", "needs a number alpha, got 'dirichlet'"),
        ("dirichlet:much", "needs a number alpha"),
        ("dirichlet:0", "above 0, got 0"),
        ("dirichlet:-1", "above 0, got -1"),
        ("dirichlet:nan", "finite number above 0, got nan"),
        ("dirichlet:inf", "finite number above 0, got inf"),
    ],
)
def test_texts_that_make_no_sense_are_refused(text, words):
    with pytest.raises(DataError, match=words):
        parse_partition(text)


# refusals


@pytest.mark.parametrize(
    ("split", "words"),
    [
        (lambda: split_iid(3, 4, 0), "4 clients for 3 examples; ask for at most 3"),
        (lambda: split_iid(3, 0, 0), "at least one client, got 0"),
        (lambda: split_by_class(LABELS[:5], 6, 1, 0), "6 clients for 5 examples"),
        (lambda: split_dirichlet(LABELS[:5], 6, 1.0, 0), "6 clients for 5 examples"),
        (lambda: split_by_class(LABELS, 10, 11, 0), "from 1 to the 10 classes of the data, got 11"),
        (lambda: split_by_class(LABELS, 10, 0, 0), "from 1 to the 10 classes.*got 0"),
        (lambda: split_by_class(LABELS, 3, 2, 0), "make 6 shards.*ask for more clients"),
        (lambda: split_by_class(LABELS[:12], 10, 2, 0), "make 20 shards.*ask for fewer clients"),
        (
            lambda: split_by_class(np.repeat([0, 1], [1, 50]), 10, 2, 0),
            "make 20 shards.*make 2 to 11;",
        ),
        (
            lambda: split_by_class(LABELS, 7, 2, 0, exact=False),
            "multiple of the 10 classes, got 7 x 2",
        ),
        (
            lambda: split_dirichlet(LABELS, 10, 0.0, 0),
            "alpha must be a finite number above 0, got 0.0",
        ),
        (lambda: split_dirichlet(LABELS, 10, -1.0, 0), "above 0, got -1.0"),
        (lambda: split_dirichlet(LABELS, 10, 1.0, 0, minimum=61), "from 1 to 60.*got 61"),
        (lambda: split_dirichlet(LABELS, 10, 1.0, 0, minimum=0), "from 1 to 60.*got 0"),
        (lambda: split_dirichlet(LABELS, 10, 1.0, 0, minimum=2.5), "whole number.*got 2.5"),
        (
            lambda: split_by_group(LABELS, 15, 0),
            "15 clients for 10 domains; ask for a multiple of 10",
        ),
        (lambda: split_by_group(np.array([0, 0, 0, 1]), 4, 0), "client 3 got none"),
        (lambda: split_by_class(LABELS / 2, 10, 2, 0), "1-D integers, got float64"),
        (lambda: split_by_class(LABELS.reshape(60, 10), 10, 2, 0), r"shape \(60, 10\)"),
        (lambda: Partition("clases", 2), "did you mean 'classes'"),
    ],
)
def test_divisions_that_cannot_be_are_refused(split, words):
    with pytest.raises(DataError, match=words):
        split()


def test_the_published_split_refuses_to_leave_a_client_empty():
    labels = np.repeat(np.arange(2), [1, 99])
    with pytest.raises(DataError, match="every client needs an example, client"):
        split_by_class(labels, 20, 1, 0, exact=False)


@pytest.mark.parametrize(
    ("text", "changed", "words"),
    [
        ("natural", {"groups_train": None}, "'natural' needs data.*id_train and id_test"),
        ("domain", {"groups_test": None}, "'domain' needs data.*domain_train and domain_test"),
        ("domain:blocks", {"groups_train": None}, "'domain:blocks' needs data.*domain_train"),
        ("domain:blocks", {"num_clients": 15}, "15 clients for 10 domains"),
        ("natural", {"num_clients": 7}, "7 clients for 10 ids; ask for 10"),
        ("domain", {"groups_test": LABELS + 5}, "group of the test set.*10, 11"),
        ("classes:2", {"labels_test": LABELS + 5}, "label of the test set.*10, 11"),
        ("dirichlet:1", {"labels_test": LABELS + 9}, "label of the test set.*10, 11"),
        ("iid", {"num_clients": None}, "'iid' needs the number of clients"),
        ("domain", {"num_clients": 601}, "601 clients for 600 examples"),
    ],
)
def test_splits_that_cannot_be_are_refused(text, changed, words):
    arguments = {
        "labels_train": LABELS,
        "groups_train": LABELS,
        "labels_test": LABELS,
        "groups_test": LABELS,
        "num_clients": 20,
    }
    with pytest.raises(DataError, match=words):
        parse_partition(text).split(**{**arguments, **changed}, seed=0)


# partitioners of flwr-datasets


@pytest.fixture
def flwr(monkeypatch):
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "0")
    return pytest.importorskip("flwr_datasets").partitioner


def test_a_flwr_iid_partitioner_is_accepted(flwr):
    rows = from_flwr(flwr.IidPartitioner(num_partitions=7), LABELS)
    assert_each_row_once(rows, 600)
    assert {len(own) for own in rows} == {85, 86}


def test_a_flwr_dirichlet_partitioner_sees_the_labels_and_stays_as_it_was(flwr):
    partitioner = flwr.DirichletPartitioner(
        num_partitions=5, partition_by="label", alpha=0.1, min_partition_size=1, seed=3
    )
    rows = from_flwr(partitioner, torch.from_numpy(LABELS))
    assert_each_row_once(rows, 600)
    assert table(LABELS, rows).max() > 40  # an alpha of 0.1 is far from 12 each
    assert same(rows, from_flwr(partitioner, LABELS))


class FakePartitioner:
    """Gives everything to the first of two clients."""

    dataset = None
    num_partitions = 2

    def load_partition(self, partition_id):
        """All the rows, or none."""
        return self.dataset if partition_id == 0 else {"idx": []}


def test_any_object_that_acts_like_one_is_accepted_but_an_empty_client_is_not():
    pytest.importorskip("datasets")
    with pytest.raises(DataError, match="client 1 got none"):
        from_flwr(FakePartitioner(), LABELS)


def test_an_object_that_is_no_partitioner_is_refused():
    with pytest.raises(DataError, match=r"load_partition.*list does not; pass e\.g\. Iid"):
        from_flwr([1, 2], LABELS)


def test_a_partitioner_without_datasets_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'fedquilt\[hub\]'"):
        from_flwr(FakePartitioner(), LABELS)
