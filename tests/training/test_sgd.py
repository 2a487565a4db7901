"""How weights move, against torch's own local_training and nets trained alone."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedquilt.errors import ConfigError
from fedquilt.training.client_loss import ClientLoss
from fedquilt.training.objectives import PlainLoss
from fedquilt.training.optimizer_settings import SGDSettings
from fedquilt.training.settings import LocalTraining
from fedquilt.training.sgd import SGDStep
from fedquilt.training.stack.program import can_stack, find_program
from fedquilt.training.trainer import make_trainer


def test_the_learning_rate_falls_at_each_milestone():
    settings = LocalTraining(lr=0.1, milestones=(150, 250), milestone_decay=0.1)
    assert [settings.lr_at(r) for r in (0, 149)] == [0.1, 0.1]
    assert [settings.lr_at(r) for r in (150, 249)] == pytest.approx([0.01, 0.01])
    assert settings.lr_at(250) == pytest.approx(0.001)


def test_a_cosine_falls_from_the_whole_rate_in_the_first_round_towards_nothing():
    settings = LocalTraining(lr=0.2, cosine=True)
    assert settings.lr_at(0, 300) == 0.2
    assert settings.lr_at(150, 300) == pytest.approx(0.1)
    assert settings.lr_at(100, 300) == pytest.approx(0.2 * 0.75)  # cos 60° = 1/2
    assert 0 < settings.lr_at(299, 300) < 1e-5
    assert settings.lr_at(0, 1) == 0.2


@given(st.floats(1e-4, 10), st.integers(1, 1000), st.data())
def test_a_cosine_never_rises_and_is_symmetric(lr, rounds, data):
    settings = LocalTraining(lr=lr, cosine=True, milestones=(1, 2), milestone_decay=0.5)
    one = data.draw(st.integers(0, rounds))
    other = data.draw(st.integers(one, rounds))
    assert lr + 1e-12 >= settings.lr_at(one, rounds) >= settings.lr_at(other, rounds) - 1e-12
    both = settings.lr_at(one, rounds) + settings.lr_at(rounds - one, rounds)
    assert both == pytest.approx(lr)


def test_a_cosine_needs_to_know_where_it_ends():
    with pytest.raises(ConfigError, match="number of rounds"):
        LocalTraining(cosine=True).lr_at(3)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize("clip", [None, 0.05, 1e6])
def test_descent_makes_the_steps_of_torch_sgd(momentum, weight_decay, clip):
    torch.manual_seed(0)
    ours = nn.ParameterList([torch.randn(4, 3), torch.randn(4), torch.randn(2)])
    theirs = copy.deepcopy(ours)
    descent = SGDStep(ours, SGDSettings(0.1, momentum, weight_decay, clip))
    sgd = torch.optim.SGD(theirs, lr=0.1, momentum=momentum, weight_decay=weight_decay)
    for step in range(4):
        x = torch.randn(5, 3)

        def loss(weights, x=x, step=step):
            # the two bias terms share one gradient tensor; the last weight is used late
            found = (x @ weights[0].T + weights[1] + weights[1]).square().mean()
            return found + weights[2].sum() if step > 1 else found

        descent.step(loss(ours))
        sgd.zero_grad()
        loss(theirs).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(theirs, clip)
        sgd.step()
        torch.testing.assert_close(list(ours), list(theirs), rtol=1e-5, atol=1e-6)


def test_gradients_that_are_followed_stay_as_they_are():
    weights = [torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)]
    descent = SGDStep(weights, SGDSettings(0.1, 0.9, weight_decay=0.1, max_grad_norm=0.5))
    gradients = [torch.arange(3.0), None]
    for _ in range(2):
        descent.apply_gradients(gradients)
    assert gradients[0].equal(torch.arange(3.0))
    assert weights[1].eq(1).all()  # no gradient, no step, no decay


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


def nets(count: int, make=Net) -> list[nn.Module]:
    """Nets that start apart, some with long gradients and some with short ones."""
    found = []
    for number in range(count):
        torch.manual_seed(number)
        net = make().train()
        with torch.no_grad():
            for weight in net.parameters():
                weight.mul_(3.0**number)
        found.append(net)
    return found


def trained(modules, settings, *, stacked: bool, steps: int = 4) -> tuple[list[nn.Module], list]:
    program = find_program(modules[0], lambda: (torch.rand(6, 1, 5, 5),)) if stacked else None
    trainer = make_trainer(
        modules, settings, PlainLoss(), ClientLoss(labels=(0, 2)), program=program
    )
    generator = torch.Generator().manual_seed(9)
    losses = []
    for _ in range(steps):
        x = torch.randn(6, 1, 5, 5, generator=generator)
        y = torch.randint(3, (6,), generator=generator)
        losses.append(trainer.step((x, y), generator).item())
    trainer.finish()
    return modules, losses


SETTINGS = {
    "plain": SGDSettings(0.1),
    "momentum": SGDSettings(0.1, momentum=0.9, weight_decay=0.01),
    "clipped": SGDSettings(0.1, momentum=0.9, weight_decay=0.01, max_grad_norm=0.1),
    "clipped without momentum": SGDSettings(0.1, weight_decay=0.01, max_grad_norm=0.1),
}


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("count", [1, 3])
def test_nets_in_one_pass_learn_what_each_would_alone(kind, count):
    settings = SETTINGS[kind]
    stacked, losses = trained(nets(count), settings, stacked=True)
    turns, in_turn = trained(nets(count), settings, stacked=False)
    alone = [trained([net], settings, stacked=False) for net in nets(count)]
    for one, other, ([single], _) in zip(stacked, turns, alone, strict=True):
        expected = single.state_dict()  # statistics and their counters too
        for name, tensor in other.state_dict().items():
            assert tensor.equal(expected[name]), name
        for name, tensor in one.state_dict().items():
            torch.testing.assert_close(tensor, expected[name], rtol=2e-4, atol=2e-5)
    assert losses == pytest.approx(in_turn, rel=1e-4)
    means = [sum(step) / count for step in zip(*(found for _, found in alone), strict=True)]
    assert in_turn == pytest.approx(means, rel=1e-5)


def test_nets_with_a_module_of_two_names_learn_in_one_pass_too():
    def made() -> nn.Module:
        common = nn.Linear(25, 25)
        return nn.Sequential(
            nn.Flatten(), common, nn.ReLU(), nn.Sequential(common), nn.Linear(25, 3)
        )

    stacked, _ = trained(nets(2, made), SETTINGS["momentum"], stacked=True)
    turns, _ = trained(nets(2, made), SETTINGS["momentum"], stacked=False)
    for one, other in zip(stacked, turns, strict=True):
        assert isinstance(one[1].weight, nn.Parameter)
        for name, tensor in one.state_dict().items():
            torch.testing.assert_close(tensor, other.state_dict()[name], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("stacked", [False, True])
def test_frozen_weights_stay_as_they_are(stacked):
    modules = nets(2)
    for module in modules:
        module.conv.weight.requires_grad_(False)
    before = [module.conv.weight.clone() for module in modules]
    trained(modules, SETTINGS["momentum"], stacked=stacked)
    for module, old in zip(modules, before, strict=True):
        assert module.conv.weight.equal(old)
        assert module.out.weight.requires_grad
        assert not module.conv.weight.requires_grad


class Asking(Net):
    """Looks at the values of its inputs, which a stack has no single answer for."""

    def forward(self, x: Tensor) -> Tensor:
        answer = super().forward(x)
        return answer if answer.sum() > 1e9 else 2 * answer


class Reading(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(self.out.bias.abs().max().item() + 1)


class Attentive(nn.Module):
    """Has a layer that no stack knows."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(2)[..., :8]
        return self.out(self.attention(x, x, x, need_weights=False)[0].mean(1))


@pytest.mark.parametrize(
    ("make", "answer"), [(Net, True), (Asking, False), (Reading, False), (Attentive, False)]
)
def test_whether_nets_can_be_stacked_is_found_and_leaves_model_and_draws_alone(make, answer):
    model = make()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    torch.manual_seed(0)
    mode = model.training
    assert can_stack(model, torch.zeros(1, 1, 5, 5)) is answer
    following = torch.rand(())
    torch.manual_seed(0)
    assert following.equal(torch.rand(()))
    assert all(t.equal(before[n]) for n, t in model.state_dict().items())
    assert model.training == mode
