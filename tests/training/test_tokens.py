"""Embeddings: a client sends back the rows that it has read, and no others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedquilt.data import Examples
from fedquilt.federation.aggregation import average
from fedquilt.federation.client import Task, Update
from fedquilt.models.transformer import MaskedTransformer
from fedquilt.structure.create import trace_structure
from fedquilt.structure.structure import Structure
from fedquilt.structure.tensors import named_tensors
from fedquilt.training import local_test
from fedquilt.training.context import ClientContext
from fedquilt.training.local_sgd import LocalSGD
from fedquilt.training.settings import LocalTraining
from fedquilt.training.tokens import map_tokens_to_groups, record_tokens

WORDS, LENGTH = 12, 5
TOKENS = {0: (0, 1, 2, 5), 1: (2, 5, 7)}  # of each client; 3, 4, 6 and 8 to 11 nobody has


class Words(nn.Module):
    """A class for each text; positions are known too, and one of them is never reached."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 6)
        self.places = nn.Embedding(LENGTH + 1, 6)
        self.hidden = nn.Linear(6, 8)
        self.classifier = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        return self.classifier(self.hidden(x.mean(1)).relu())  # type: ignore[no-any-return]


class Tied(nn.Module):
    """Says which word comes next by the same vectors that it reads words with."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 6)
        self.hidden = nn.Linear(6, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        x = self.hidden(self.words(tokens).mean(1)).relu()
        return x @ self.words.weight.t()


def texts(client: int, num_classes: int = 3) -> Examples:
    generator = torch.Generator().manual_seed(client)
    own = torch.tensor(TOKENS[client])
    drawn = torch.randint(len(own), (8, LENGTH), generator=generator)
    drawn[0, : len(own)] = torch.arange(len(own))  # each of them at least once
    labels = torch.randint(num_classes, (8,), generator=generator)
    return Examples(own[drawn], labels)


def made(net: nn.Module, num_classes: int = 3) -> tuple[Structure, ClientContext]:
    structure = trace_structure(net, texts(0).batch(torch.arange(2))[0])
    data = {client: texts(client, num_classes) for client in TOKENS}
    return structure, ClientContext(net, structure, {"train": data, "test": data})


def trained(net: nn.Module, client: int, width: float = 1.0, **settings) -> Update:
    structure, context = made(net)
    decaying = LocalTraining(epochs=1, batch_size=4, weight_decay=0.1)
    recipe = LocalSGD(decaying, lr=0.1, **{"labels": (0, 1, 2), "own_rows": True, **settings})
    return recipe.run(
        Task(client, (structure.subnet(width),), params_of(net), recipe, 0), context
    ).update


def params_of(net: nn.Module) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in named_tensors(net).items()}


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return Words()


def test_what_embeddings_look_up_is_noted_while_it_is_asked_for(net):
    structure, _ = made(net)
    with record_tokens(net) as seen:
        net(torch.tensor([[3, 3, 9]]))
        net(torch.tensor([[4, 3, 3]]))
    net(torch.tensor([[0, 0, 0]]))
    assert map_tokens_to_groups(structure, seen) == {"words": {3, 4, 9}, "places": {0, 1, 2}}


def test_tokens_may_be_named_and_bags_are_read_too():
    bag = nn.Sequential(nn.EmbeddingBag(WORDS, 4))
    with record_tokens(bag) as seen:
        bag[0](input=torch.tensor([2, 5, 5], dtype=torch.int32), offsets=torch.tensor([0]).int())
    assert torch.where(seen["0.weight"])[0].tolist() == [2, 5]


def test_an_embedding_whose_rows_are_computed_is_left_whole():
    computed = nn.utils.parametrizations.weight_norm(nn.Embedding(WORDS, 4))
    with record_tokens(computed) as seen:
        computed(torch.tensor([1]))
    assert seen == {}


@pytest.mark.parametrize("width", [1.0, 0.5])
@pytest.mark.parametrize("client", TOKENS)
def test_a_client_sends_the_rows_of_its_tokens_as_it_trained_them(net, client, width):
    rows, whole = (trained(net, client, width, own_rows=own) for own in (True, False))
    for name, tensor in whole.params[0].items():
        own = {"words.weight": list(TOKENS[client]), "places.weight": list(range(LENGTH))}
        assert rows.params[0][name].equal(tensor[own.get(name, slice(None))]), name


def test_a_row_is_averaged_over_those_who_read_it_and_stays_if_nobody_did(net):
    """Though every client's weight decay moves all the rows that it was given."""
    before = params_of(net)
    updates = [trained(net, client) for client in TOKENS]
    structure, _ = made(net)
    after = average(before, structure, updates)["words.weight"]
    moved = [trained(net, client, own_rows=False).params[0]["words.weight"] for client in TOKENS]
    for word in range(WORDS):
        readers = [client for client, tokens in TOKENS.items() if word in tokens]
        if readers:
            expected = torch.stack([moved[client][word] for client in readers]).mean(0)
            torch.testing.assert_close(after[word], expected, rtol=1e-6, atol=1e-7)
            assert not after[word].equal(before["words.weight"][word])
        else:
            assert after[word].equal(before["words.weight"][word])
            assert not moved[0][word].equal(before["words.weight"][word])


def test_of_a_matrix_that_reads_and_answers_both_kinds_of_rows_go_back():
    net = Tied()
    update = trained(net, 1, labels=(0, 7))
    whole = trained(net, 1, labels=(0, 7), own_rows=False)
    rows = sorted({0, 7, *TOKENS[1]})
    assert update.params[0]["words.weight"].equal(whole.params[0]["words.weight"][rows])


def test_the_token_of_hidden_ones_is_everybodys():
    sizes = {"num_classes": WORDS, "length": LENGTH, "dim": 8, "hidden": 8, "layers": 1, "heads": 2}
    net = MaskedTransformer(**sizes, mask_rate=0.5)
    structure = trace_structure(net, torch.zeros(2, LENGTH, dtype=torch.int64))
    tokens = texts(1).inputs
    context = ClientContext(net, structure, {"train": {1: Examples(tokens, tokens)}})
    recipe = LocalSGD(
        LocalTraining(epochs=4, batch_size=4), lr=0.1, labels=TOKENS[1], own_rows=True
    )
    task = Task(1, (structure.subnet(0.5),), params_of(net), recipe, 0)
    (sent,) = recipe.run(task, context).update.subnets
    assert sent.channels("embedding").tolist() == [*TOKENS[1], WORDS]
    assert sent.channels(structure.classes).tolist() == list(TOKENS[1])


def test_words_that_a_client_did_not_send_are_tested_as_it_received_them(net):
    """Without weight decay they are the same as in the whole net that it has trained."""
    structure = trace_structure(net, texts(0).inputs[:2])
    foreign = Examples(torch.randint(WORDS, (60, LENGTH)), torch.randint(3, (60,)))
    context = ClientContext(net, structure, {"train": {1: texts(1)}, "test": {1: foreign}})
    found = []
    for own_rows in (True, False):
        recipe = LocalSGD(
            LocalTraining(weight_decay=0), lr=0.1, labels=(0, 1, 2), own_rows=own_rows
        )
        task = Task(1, (structure.subnet(0.5),), params_of(net), recipe, 0)
        metrics = local_test.WithLocalTest(recipe).run(task, context).update.metrics
        found.append((metrics[local_test.RIGHT], metrics[local_test.TESTED]))
    assert found[0] == found[1]
    assert found[0][1] == 60
