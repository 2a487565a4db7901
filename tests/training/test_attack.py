"""The attack, against foolbox's and against the laws of projection."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedquilt.data import Normalize
from fedquilt.errors import ConfigError
from fedquilt.training.attack import PGD, frozen_model

ROUNDING = 1e-6


def classifier(seed: int = 0, channels: int = 1) -> nn.Module:
    """A small net in double precision, so that no gradient's sign hangs on rounding."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Conv2d(channels, 6, 3),
        nn.BatchNorm2d(6),
        nn.Tanh(),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(54, 4),
    ).double()
    net(torch.rand(64, channels, 5, 5).double())  # statistics other than 0 and 1
    return net.eval()


def pixels(seed: int, count: int = 20, channels: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, channels, 5, 5, generator=generator, dtype=torch.float64)
    x[0], x[1] = 0.0, 1.0  # nothing below or above them
    return x, torch.randint(4, (count,), generator=generator)


def foolbox_attack(net, x, y, epsilon, step, steps, bounds=(0, 1), preprocessing=None):
    with warnings.catch_warnings():
        # foolbox 3.3.4 still imports from scipy.ndimage.filters
        warnings.filterwarnings("ignore", "Please import `.*` from the `scipy", DeprecationWarning)
        import foolbox
    model = foolbox.PyTorchModel(net, bounds, device=x.device, preprocessing=preprocessing)
    attack = foolbox.attacks.LinfPGD(abs_stepsize=step, steps=steps, random_start=False)
    return attack.run(model, x, y, epsilon=epsilon)


@pytest.mark.parametrize(("epsilon", "steps", "step_size"), [
    (8 / 255, 7, 2 / 255),
    (8 / 255, 7, None),
    (0.3, 1, 0.05),
    (0.05, 12, 0.04),  # steps that overshoot and are called back
])  # fmt: skip
def test_the_attack_is_foolboxs(epsilon, steps, step_size):
    net, (x, y) = classifier(), pixels(1)
    attack = PGD(epsilon, steps, step_size, random_start=False)
    expected = foolbox_attack(net, x, y, epsilon, attack.step, steps)
    torch.testing.assert_close(attack.perturb(net, x, y), expected, rtol=0, atol=ROUNDING)


def test_on_normalised_inputs_it_is_the_attack_on_the_pixels():
    scale = Normalize((0.49, 0.3, 0.6), (0.2, 0.05, 0.5))
    net, (x, y) = classifier(channels=3), pixels(2, channels=3)
    attack = PGD(0.1, 5, 0.03, random_start=False, scale=scale)
    preprocessing = {"mean": scale.mean, "std": scale.std, "axis": -3}
    expected = foolbox_attack(net, x, y, 0.1, 0.03, 5, preprocessing=preprocessing)
    normalised = scale.apply(x)
    found = attack.perturb(net, normalised, y)
    torch.testing.assert_close(found, scale.apply(expected), rtol=0, atol=1e-5)
    start = PGD(0.1, 5, 0.03, scale=scale).perturb(net, normalised, y, torch.Generator())
    back = start * torch.tensor(scale.std).view(-1, 1, 1) + torch.tensor(scale.mean).view(-1, 1, 1)
    assert (back - x).abs().amax((0, 2, 3)).sub(0.1).abs().max() < 1e-5  # in every channel
    assert back.min() > -ROUNDING
    assert back.max() < 1 + ROUNDING


@given(
    seed=st.integers(0, 99),
    epsilon=st.floats(0, 1.5),
    steps=st.integers(1, 4),
    step_size=st.none() | st.floats(1e-3, 2.0),
    random_start=st.booleans(),
    low=st.sampled_from([0.0, -0.5, -torch.inf]),
    high=st.sampled_from([1.0, 1.2, torch.inf]),
)
@settings(max_examples=60, deadline=None)
def test_what_it_finds_is_in_the_ball_and_in_the_range(
    seed, epsilon, steps, step_size, random_start, low, high
):
    net, (x, y) = classifier(), pixels(seed, count=4)
    attack = PGD(epsilon, steps, step_size, random_start, low, high)
    seen = []
    found = attack.perturb(
        lambda x: (seen.append(x.detach()), net(x))[1], x, y, torch.Generator().manual_seed(seed)
    )
    assert len(seen) == steps
    for near in (*seen, found):  # on the way, too
        assert (near - x).abs().max() <= epsilon + ROUNDING
        assert near.min() >= low
        assert near.max() <= high
    assert found.shape == x.shape
    assert found.dtype == x.dtype
    assert not found.requires_grad
    if not random_start:  # no farther than it can walk
        assert (found - x).abs().max() <= attack.step * steps + ROUNDING


def test_a_random_start_is_uniform_in_the_ball():
    x, y = torch.full((1, 40_000), 0.5), torch.tensor([0])

    def indifferent(x):
        return 0 * x[:, :2]  # so the attack stays where it starts

    moved = PGD(0.1).perturb(indifferent, x, y, torch.Generator().manual_seed(0)) - x
    assert moved.min() < -0.0999
    assert moved.max() > 0.0999
    assert moved.mean().abs() < 1e-3
    assert moved.std() == pytest.approx(0.2 / 12**0.5, rel=0.02)


def test_what_it_finds_depends_on_the_generator_only():
    net, (x, y) = classifier(), pixels(3)

    def found(seed):
        return PGD().perturb(net, x, y, torch.Generator().manual_seed(seed))

    first = found(1)
    torch.rand(17)
    assert found(1).equal(first)
    assert not found(2).equal(first)
    state = torch.get_rng_state()
    found(1)
    assert torch.get_rng_state().equal(state)


def test_an_example_is_attacked_the_same_in_any_company():
    net, (x, y) = classifier(), pixels(4)
    attack = PGD(random_start=False)
    alone = torch.cat([attack.perturb(net, x[i : i + 1], y[i : i + 1]) for i in range(len(y))])
    torch.testing.assert_close(attack.perturb(net, x, y), alone, rtol=0, atol=ROUNDING)


def test_the_attack_fools_a_net_and_hurts_more_than_noise():
    x, _ = pixels(5, count=200)
    y = (x[:, 0, 2, 2] > 0.5).long() + 2 * (x[:, 0, 1, 1] > 0.5).long()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(25, 64), nn.ReLU(), nn.Linear(64, 4)).double()
    local_training = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(150):
        local_training.zero_grad()
        F.cross_entropy(net(x), y).backward()
        local_training.step()

    def accuracy(inputs):
        return (net(inputs).argmax(1) == y).double().mean().item()

    generator = torch.Generator().manual_seed(0)
    attacked = accuracy(PGD(0.1).perturb(net, x, y, generator))
    noise = torch.rand(x.shape, generator=generator, dtype=x.dtype)
    assert accuracy(x) > 0.95
    assert attacked < accuracy((x + 0.1 * (2 * noise - 1)).clamp(0, 1)) - 0.2


def test_parameters_and_inputs_are_left_alone():
    net, (x, y) = classifier(), pixels(6)
    before, state = x.clone(), copy.deepcopy(net.state_dict())
    x.requires_grad_()
    found = PGD().perturb(net, x, y, torch.Generator())
    assert x.grad is None
    assert x.detach().equal(before)
    assert found.data_ptr() != x.data_ptr()
    assert all(p.grad is None for p in net.parameters())
    assert all(t.equal(state[n]) for n, t in net.state_dict().items())


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_the_attack_works_where_gradients_are_off(mode):
    net, (x, y) = classifier(), pixels(7)
    expected = PGD().perturb(net, x, y, torch.Generator().manual_seed(1))
    with mode():
        found = PGD().perturb(net, x + 0, y + 0, torch.Generator().manual_seed(1))
    assert found.equal(expected)
    assert not found.is_inference()


def test_logits_may_have_more_axes():
    torch.manual_seed(0)
    net = nn.Linear(5, 3)
    x, y = torch.rand(2, 4, 5), torch.randint(3, (2, 4))
    attack = PGD(random_start=False)
    rows = attack.perturb(net, x.flatten(0, 1), y.flatten()).view(2, 4, 5)
    assert attack.perturb(net, x, y).equal(rows)


def test_inputs_out_of_range_are_refused_with_the_remedy():
    net, (x, y) = classifier(), pixels(8)
    with pytest.raises(ConfigError, match=r"pixels in \[0.0, 1.0\].*scale=Normalize"):
        PGD().perturb(net, (x - 0.5) / 0.25, y)
    PGD().perturb(net, x + 1e-5, y)  # rounding is no offence
    scale = Normalize((0.5,), (0.25,))
    PGD(scale=scale).perturb(net, scale.apply(x), y)


@pytest.mark.parametrize("wrong", [
    {"epsilon": -0.1}, {"epsilon": float("nan")}, {"steps": 0}, {"low": 1.0}, {"step_size": 0.0},
])  # fmt: skip
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ConfigError):
        PGD(**wrong)


def test_the_default_step_is_the_public_codes():
    assert PGD(8 / 255, 7).step == pytest.approx(1.25 * 8 / 255 / 7)
    assert PGD(20 / 255, 10).step == pytest.approx(24 / 255 / 10)
    assert PGD(step_size=2 / 255).step == 2 / 255


def test_an_attack_can_be_sent_and_compared():
    attack = PGD(scale=Normalize((0.5,), (0.2,)))
    attack.perturb(classifier(), attack.scale.apply(pixels(0)[0]), pixels(0)[1])
    assert pickle.loads(pickle.dumps(attack)) == attack
    assert len({attack, PGD(scale=Normalize((0.5,), (0.2,))), PGD()}) == 2


def flags(model):
    modes = {n: m.training for n, m in model.named_modules()}
    return modes, {n: p.requires_grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("fails", [False, True])
def test_a_model_is_frozen_and_then_exactly_as_it_was(fails):
    net = classifier().train()
    net[1].eval()
    net[4].eval()
    net[0].bias.requires_grad_(False)
    net[5].weight.grad = torch.ones_like(net[5].weight)
    before = flags(net)

    def use():
        with frozen_model(net):
            assert not any(m.training for m in net.modules())
            assert not any(p.requires_grad for p in net.parameters())
            if fails:
                raise KeyError

    if fails:
        with pytest.raises(KeyError):
            use()
    else:
        use()
    assert flags(net) == before
    assert net[5].weight.grad.eq(1).all()


def test_a_frozen_model_keeps_its_statistics():
    net, (x, y) = classifier().train(), pixels(9)
    state = copy.deepcopy(net.state_dict())
    with frozen_model(net):
        PGD().perturb(net, x, y, torch.Generator())
    assert all(t.equal(state[n]) for n, t in net.state_dict().items())
