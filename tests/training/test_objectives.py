"""What a batch costs, against Algorithm 4 written out by hand."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedquilt.errors import ConfigError
from fedquilt.training.attack import PGD
from fedquilt.training.client_loss import ClientLoss
from fedquilt.training.conditional import FiLM, make_conditional
from fedquilt.training.dualnorm import DualNorm, make_dual, set_robustness
from fedquilt.training.objectives import Adversarial, OnceForAll, PlainLoss

ATTACK = PGD(0.1, 3, random_start=False)
BUILDERS = {"plain": lambda net: net, "dual": make_dual, "conditional": make_conditional}


def net(kind: str = "plain") -> nn.Module:
    """A net in double precision whose halves differ."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)
    )
    model = BUILDERS[kind](model.double())
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.startswith("1."):
                tensor += 0.2 * torch.rand_like(tensor)
        for name, tensor in model.named_buffers():
            if "running" in name:
                tensor += 0.2 * torch.rand_like(tensor)
    return model.train()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(8, 1, 5, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (8,), generator=generator)


def with_half(model: nn.Module, half: str, robustness: float) -> nn.Module:
    """A plain net of the model's tensors, with one half of its normalisation."""
    for layer in model.modules():
        if isinstance(layer, FiLM):
            layer.robustness = robustness
    layers = list(model)
    if isinstance(layers[1], DualNorm):
        layers[1] = getattr(layers[1], half)
    elif not isinstance(layers[1], nn.BatchNorm2d):
        layers[1] = nn.Sequential(getattr(layers[1].norm, half), layers[1].film)
    return nn.Sequential(*layers)


def masked(logits: Tensor, own: tuple[int, ...] | None) -> Tensor:
    if own is None:
        return logits
    keep = torch.zeros(logits.shape[1], dtype=logits.dtype)
    keep[list(own)] = 1
    return logits * keep


def algorithm_4(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    share: float,
    own: tuple[int, ...] | None,
    halves: tuple[str, str] = ("clean", "noise"),
) -> Tensor:
    """Lines 5 to 12, with the attack of ``ATTACK`` written out."""
    loss = torch.zeros((), dtype=torch.float64)
    if share < 1:
        clean = with_half(model, halves[0], share)
        loss = loss + (1 - share) * F.cross_entropy(masked(clean(x), own), y)
    if share > 0:
        noise = with_half(model, halves[1], share)
        noise.eval()
        near = x.clone()
        for _ in range(ATTACK.steps):
            near = near.detach().requires_grad_()
            (slope,) = torch.autograd.grad(F.cross_entropy(noise(near), y), near)
            near = near + ATTACK.step * slope.sign()
            near = torch.max(torch.min(near, x + ATTACK.epsilon), x - ATTACK.epsilon).clamp(0, 1)
        noise.train()
        loss = loss + share * F.cross_entropy(masked(noise(near.detach()), own), y)
    return loss


def same_step(objective, kind, share, own, halves=("clean", "noise")) -> None:
    """The loss, its gradients and what became of the statistics are those of the oracle."""
    ours, theirs = net(kind), net(kind)
    x, y = batch()
    found = objective.loss(ours, (x, y), ClientLoss(labels=own), torch.Generator().manual_seed(0))
    expected = algorithm_4(theirs, x, y, share, own, halves)
    torch.testing.assert_close(found, expected)
    found.backward()
    expected.backward()
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, msg=name)
    for (name, one), other in zip(ours.named_buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(one, other, msg=name)


@pytest.mark.parametrize("own", [None, (0, 1, 2), (0, 2)])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("kind", ["plain", "dual"])
def test_adversarial_training_is_algorithm_4(kind, share, own):
    same_step(Adversarial(ATTACK, share), kind, share, own)


@pytest.mark.parametrize("own", [None, (0, 2)])
@pytest.mark.parametrize(("share", "half"), [(0.0, "clean"), (0.2, "noise"), (1.0, "noise")])
def test_once_for_all_training_is_algorithm_4_with_the_half_that_the_robustness_chooses(
    share, half, own
):
    same_step(OnceForAll(ATTACK, (share,)), "conditional", share, own, (half, half))


def test_the_default_share_is_the_papers():
    assert Adversarial().share == 0.5
    assert (Adversarial().attack.epsilon, Adversarial().attack.steps) == (8 / 255, 7)
    assert OnceForAll().shares == (0.0, 0.2, 0.5, 0.8, 1.0)


@pytest.mark.parametrize("own", [None, (0, 2)])
def test_the_plain_objective_is_cross_entropy(own):
    x, y = batch()
    found = PlainLoss().loss(net(), (x, y), ClientLoss(labels=own), torch.Generator())
    torch.testing.assert_close(found, F.cross_entropy(masked(net()(x), own), y))


def test_share_0_is_plain_and_draws_nothing():
    x, y = batch()
    generator = torch.Generator().manual_seed(1)
    before = generator.get_state()
    found = Adversarial(PGD(), 0.0).loss(net(), (x, y), ClientLoss(), generator)
    assert found.equal(PlainLoss().loss(net(), (x, y), ClientLoss(), generator))
    assert generator.get_state().equal(before)


class Counted(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.calls = model, []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append("train" if self.training else "eval")
        return self.model(x)


@pytest.mark.parametrize(
    ("share", "calls"),
    [(0.0, ["train"]), (0.5, ["train", *["eval"] * 3, "train"]), (1.0, [*["eval"] * 3, "train"])],
)
def test_no_pass_is_made_in_vain(share, calls):
    model = Counted(net("dual")).train()
    x, y = batch()
    Adversarial(ATTACK, share).loss(model, (x, y), ClientLoss(), torch.Generator())
    assert model.calls == calls


@pytest.mark.parametrize("kind", BUILDERS)
@pytest.mark.parametrize("fails", [False, True])
def test_the_module_is_afterwards_as_before(kind, fails):
    model = net(kind)
    model[0].weight.requires_grad_(False)
    model[4].eval()
    layers = [m for m in model.modules() if hasattr(m, "robustness")]
    for number, layer in enumerate(layers):
        layer.robustness = number / 10

    def flags():
        return (
            {n: m.training for n, m in model.named_modules()},
            {n: (p.requires_grad, p.grad) for n, p in model.named_parameters()},
            [(m.robustness, getattr(m, "path", None)) for m in layers],
        )

    before, (x, y) = flags(), batch()
    more = {"plain": [PlainLoss()], "conditional": [OnceForAll(ATTACK, (0.5,))]}.get(kind, [])
    for objective in [*more, Adversarial(ATTACK)]:
        if fails:
            with pytest.raises(RuntimeError):
                objective.loss(model, (x[:, :, :4], y), ClientLoss(), torch.Generator())
        else:
            loss = objective.loss(model, (x, y), ClientLoss(), torch.Generator())
            assert loss.requires_grad
        assert flags() == before


def test_every_share_is_drawn_by_the_generator_alone():
    x, y = batch()
    model = net("conditional")
    seen: list[float] = []
    model[1].film.register_forward_pre_hook(lambda m, _: seen.append(m.robustness))
    objective = OnceForAll(PGD(steps=1), (0.0, 0.25, 1.0))

    def draws(seed):
        generator = torch.Generator().manual_seed(seed)
        found = []
        for _ in range(30):
            seen.clear()
            objective.loss(copy.deepcopy(model), (x, y), ClientLoss(), generator)
            found.append(seen[0])
        return found

    first = draws(0)
    assert set(first) == {0.0, 0.25, 1.0}
    torch.rand(3)
    assert draws(0) == first
    assert draws(1) != first


def told_by_hand(model: nn.Module, x: Tensor, shares: Tensor, *, half: str) -> Tensor:
    """The net with the normalization of one half, by the batch in training, and a λ a row."""
    norm = getattr(model[1].norm, half)
    features = model[0](x)
    if model.training:
        mean, var = features.mean((0, 2, 3)), features.var((0, 2, 3), correction=0)
        with torch.no_grad():  # the attack, in evaluation mode, sees what this leaves behind
            norm.running_mean.lerp_(mean, 0.1)
            norm.running_var.lerp_(features.var((0, 2, 3)), 0.1)
    else:
        mean, var = norm.running_mean, norm.running_var
    affine = norm.weight / (var + norm.eps).sqrt()
    features = (features - mean.view(-1, 1, 1)) * affine.view(-1, 1, 1) + norm.bias.view(-1, 1, 1)
    film = model[1].film
    rows = []
    for row, share in zip(features, shares, strict=True):
        film.robustness = float(share)
        rows.append(film(row.unsqueeze(0)))
    film.robustness = 0.0
    return model[4](torch.cat(rows).relu().flatten(1))


@pytest.mark.parametrize("own", [None, (0, 2)])
def test_every_example_can_have_a_trade_off_of_its_own(own):
    """(1 - λ) L(x) + λ L(x + δ), and the clean halves for λ = 0 alone."""
    x, y = batch()
    model, shares = net("conditional"), torch.tensor([0.0, 0.2, 0.5, 0.0, 1.0, 0.2, 0.0, 0.5])
    with torch.no_grad():
        for tensor in model[1].film.parameters():
            tensor += 0.3 * torch.rand_like(tensor)
    by_hand = copy.deepcopy(model)
    is_clean = shares == 0
    outputs = torch.zeros(8, 3, dtype=torch.float64)
    for half, rows in (("clean", is_clean), ("noise", ~is_clean)):
        outputs[rows] = told_by_hand(by_hand, x[rows], shares[rows], half=half)
    rows = ~is_clean
    by_hand.eval()
    near = ATTACK.perturb(
        lambda x: told_by_hand(by_hand, x, shares[rows], half="noise"), x[rows], y[rows]
    )
    by_hand.train()
    attacked = told_by_hand(by_hand, near, shares[rows], half="noise")
    clean = F.cross_entropy(masked(outputs, own), y, reduction="none")
    worse = F.cross_entropy(masked(attacked, own), y[rows], reduction="none")
    expected = (((1 - shares) * clean).sum() + (shares[rows] * worse).sum()) / 8
    objective = OnceForAll(ATTACK, per_example=True)
    object.__setattr__(objective, "_draw_shares", lambda count, generator: shares)
    before = flags_of(model)
    found = objective.loss(model, (x, y), ClientLoss(labels=own), torch.Generator())
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert flags_of(model) == before
    found.backward()
    expected.backward()
    for one, other in zip(model.parameters(), by_hand.parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-6)


def flags_of(model: nn.Module) -> list[object]:
    norm, film = model[1].norm, model[1].film
    return [model.training, norm.training, norm.path, norm.robustness, film.robustness]


def test_no_example_is_alone_in_its_half_whatever_is_drawn():
    objective = OnceForAll(ATTACK, (0.0, 0.5, 1.0), per_example=True)
    generator, seen = torch.Generator().manual_seed(0), set()
    for count in (1, 2, 3, 4, 32):
        for _ in range(60):
            shares = objective._draw_shares(count, generator)
            num_clean = int((shares == 0).sum())
            assert count == 1 or (num_clean != 1 and count - num_clean != 1)
            seen |= set(shares.tolist())
    assert seen == {0.0, 0.5, 1.0}


def test_a_loss_depends_on_the_generator_only():
    x, y = batch()

    def loss(seed):
        generator = torch.Generator().manual_seed(seed)
        return Adversarial(PGD(0.1)).loss(net("dual"), (x, y), ClientLoss(), generator)

    assert loss(1).equal(loss(1))
    assert not loss(1).equal(loss(2))


def test_a_leftover_robustness_does_not_change_adversarial_training():
    x, y = batch()
    model, other = net("dual"), net("dual")
    set_robustness(other, 0.4)
    losses = [
        Adversarial(ATTACK).loss(m, (x, y), ClientLoss(), torch.Generator().manual_seed(0))
        for m in (model, other)
    ]
    assert losses[0].equal(losses[1])


def test_once_for_all_needs_a_model_that_can_be_told():
    x, y = batch()
    with pytest.raises(ConfigError, match="no robustness dial"):
        OnceForAll().loss(net(), (x, y), ClientLoss(), torch.Generator())


def test_adversarial_training_makes_a_net_harder_to_fool():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(256, 1, 5, 5, generator=generator, dtype=torch.float64)
    weak, strong = x[:, 0, :2].mean((1, 2)), x[:, 0, 4, 4]
    x[:, 0, 4, 4] = torch.where(strong > 0.5, strong / 4 + 0.75, strong / 4)
    x[:, 0, :2] += 0.1 * torch.where(strong > 0.5, 1, -1)[:, None, None] - weak[:, None, None] + 0.5
    x, y = x.clamp(0, 1), (strong > 0.5).long()

    def robust_accuracy(objective):
        model = net("dual")
        local_training = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(40):
            local_training.zero_grad()
            objective.loss(model, (x, y), ClientLoss(), generator).backward()
            local_training.step()
        set_robustness(model.eval(), 1.0 if isinstance(objective, Adversarial) else 0.0)
        near = PGD(0.15, 10).perturb(model, x, y, torch.Generator().manual_seed(0))
        return (model(near).argmax(1) == y).double().mean().item()

    assert robust_accuracy(Adversarial(PGD(0.15, 4))) > robust_accuracy(PlainLoss()) + 0.1


def test_objectives_are_plain_settings():
    settings = [PlainLoss(), Adversarial(), Adversarial(ATTACK, 0.2), OnceForAll()]
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert len({*settings, PlainLoss(), Adversarial(PGD(), 0.5)}) == 4


@pytest.mark.parametrize("make", [
    lambda: Adversarial(share=1.5), lambda: Adversarial(share=float("nan")),
    lambda: OnceForAll(shares=()), lambda: OnceForAll(shares=(0.5, -1)),
])  # fmt: skip
def test_shares_that_make_no_sense_are_refused(make):
    with pytest.raises(ConfigError, match="share"):
        make()
