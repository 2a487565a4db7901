import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from fedquilt.data.population import clients
from fedquilt.errors import DataError
from fedquilt.federation.client import SERVER


def images(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 1, 4, 4, generator=generator), torch.arange(count) % 4


def test_one_set_is_divided_without_loss_and_tested_alike():
    people = clients(images(40), test=images(20, 1), partition="classes:2", count=4)
    assert sum(c.num_examples for c in people.clients) == 40
    for client in people.clients:
        assert len(client.labels) == 2
        assert people.train[client.id].label_set == client.labels
        assert set(people.test[client.id].label_set) <= set(client.labels)
    assert len(people.test[SERVER]) == 20
    assert people.held_out
    assert people.testers == (0, 1, 2, 3)


def test_a_list_gives_every_client_its_own_set():
    sets = [TensorDataset(*images(n, n)) for n in (3, 5, 8)]
    people = clients(sets, test=images(6), budgets=[1, 0.5, 0.25])
    assert [c.num_examples for c in people.clients] == [3, 5, 8]
    assert [c.budget.width for c in people.clients] == [1, 0.5, 0.25]
    x, _ = people.train[1].batch(torch.arange(5))
    assert torch.equal(x, sets[1].tensors[0])
    assert people.testers == ()


def test_two_arrays_are_one_set_and_two_sets_are_two_clients():
    x, y = images(12)
    assert len(clients((x.numpy(), y.numpy()), count=3).clients) == 3
    assert len(clients([TensorDataset(x, y), TensorDataset(x, y)]).clients) == 2


def test_the_seed_decides_the_division():
    def rows(seed):
        people = clients(images(30), count=3, seed=seed)
        return people.train[0].batch(torch.arange(10))[0]

    assert torch.equal(rows(1), rows(1))
    assert not torch.equal(rows(1), rows(2))


def test_groups_are_clients_of_their_own():
    ids = np.repeat([7, 8, 9], [4, 4, 2])
    people = clients(images(10), partition="natural", groups=(ids, None))
    assert [c.num_examples for c in people.clients] == [4, 4, 2]


# validation


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(0, 99))
def test_the_last_examples_of_every_client_are_its_validation(sizes, hundredths):
    sets = [TensorDataset(*images(n, n)) for n in sizes]
    people = clients(sets, validation=hundredths / 100)
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
    people = clients([TensorDataset(x, torch.tensor([0, 1, 2, 3]))], validation=0.5)
    assert people.clients[0].labels == (0, 1)
    assert people.validation[0].label_set == (2, 3)


def test_one_set_is_divided_first_and_held_back_then():
    ids = np.tile([0, 1], 10)
    options = {"partition": "domain:blocks", "count": 4, "groups": (ids, ids)}
    whole = clients(images(20), test=images(20, 1), **options)
    people = clients(images(20), test=images(20, 1), validation=0.4, **options)
    for i in range(4):
        before, _ = whole.train[i].batch(torch.arange(5))
        assert torch.equal(people.train[i].batch(torch.arange(3))[0], before[:3])
        assert torch.equal(people.validation[i].batch(torch.arange(2))[0], before[3:])
        assert torch.equal(people.test[i].labels, whole.test[i].labels)


def test_there_is_a_split_for_validation_only_where_somebody_has_some():
    assert set(clients(images(12), count=3).data) == {"train", "test"}
    assert set(clients(images(12), count=3, validation=0.1).data) == {"train", "test"}
    people = clients(images(12), count=3, validation=0.25)
    assert people.data["validation"] is people.validation
    assert set(people.validation) == {0, 1, 2}


@pytest.mark.parametrize("share", [1, 1.5, -0.1, float("nan")])
def test_a_validation_share_outside_0_to_1_is_refused(share):
    with pytest.raises(DataError, match=r"in \[0, 1\), got .*write 0.1 for a tenth"):
        clients(images(12), count=3, validation=share)


# refusals


def test_a_client_without_data_is_refused_by_number():
    with pytest.raises(DataError, match="client 1 has no data"):
        clients([TensorDataset(*images(3)), TensorDataset(*images(0))])


def test_test_sets_must_match_the_clients():
    with pytest.raises(DataError, match="2 clients but 1 test sets"):
        clients([TensorDataset(*images(3))] * 2, test=[TensorDataset(*images(3))])
