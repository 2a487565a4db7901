"""Batches: what comes out of examples, and what is refused."""

import itertools
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from fedquilt.data import (
    ConcatExamples,
    DatasetExamples,
    Examples,
    Normalize,
    Windows,
    to_examples,
)
from fedquilt.data import examples as module
from fedquilt.data.pipeline import get_augmentation
from fedquilt.data.transformed import transform_examples
from fedquilt.errors import DataError


def images(count=6, channels=3, size=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (count, channels, size, size)
    return torch.randint(256, shape, generator=generator, dtype=torch.uint8)


def labels(count=6):
    return torch.arange(count) % 3


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


class Pairs(Dataset):
    """A map-style dataset with nothing but items; counts how often it is read."""

    def __init__(self, inputs, targets):
        self.inputs, self.answers, self.reads = inputs, targets, 0

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, row):
        self.reads += 1
        return self.inputs[row], self.answers[row]


class Noisy(Pairs):
    """Adds noise from torch's global generator, as torchvision's transforms do."""

    def __getitem__(self, row):
        return self.inputs[row] + torch.rand(()), self.answers[row]


class WithTargets(Pairs):
    """Keeps its labels where torchvision's sets keep them, and may transform them."""

    target_transform = None

    @property
    def targets(self):
        """The labels before they are transformed."""
        return list(self.answers)

    def __getitem__(self, row):
        transform = self.target_transform or int
        return super().__getitem__(row)[0], transform(self.answers[row])


# Normalise


def test_normalise_matches_a_float_oracle():
    raw = images(20)
    scale = Normalize.from_images(raw)
    floats = raw.double() / 255
    assert scale.mean == tuple(round(m, 4) for m in floats.mean((0, 2, 3)).tolist())
    std = floats.transpose(0, 1).flatten(1).std(dim=1, unbiased=False)
    assert scale.std == tuple(round(s, 4) for s in std.tolist())


def test_normalise_of_a_constant_channel_does_not_divide_by_zero():
    raw = images(4)
    raw[:, 1] = 51
    assert Normalize.from_images(raw).mean[1] == 0.2
    assert Normalize.from_images(raw).std[1] == 1.0


def test_normalise_is_measured_on_images_only():
    with pytest.raises(DataError, match=r"uint8 images.*float32"):
        Normalize.from_images(torch.zeros(2, 3))


# Examples


def test_a_batch_is_the_rows_asked_for_in_their_order():
    data = Examples(images(), labels())
    x, y = data.batch(torch.tensor([4, 1]))
    assert torch.equal(x, images()[[4, 1]].float() / 255)
    assert torch.equal(y, torch.tensor([1, 1]))
    assert x.dtype == torch.float32


def test_scale_centres_each_channel():
    raw = images()
    scale = Normalize((0.1, 0.2, 0.3), (0.5, 0.6, 0.7))
    x, _ = Examples(raw, labels(), scale).batch(torch.arange(6))
    for channel, (mean, std) in enumerate(zip(scale.mean, scale.std, strict=True)):
        torch.testing.assert_close(x[:, channel], (raw[:, channel] / 255 - mean) / std)


def test_the_cache_changes_no_bit(monkeypatch):
    data = Examples(images(), labels(), Normalize.from_images(images()))
    rows = torch.tensor([5, 0, 3])
    cached, _ = data.batch(rows)
    monkeypatch.setattr(module, "CACHED_CELLS", 0)
    fresh, _ = data.batch(rows)
    assert "_prepared_inputs" in vars(data)
    assert torch.equal(cached, fresh)


def test_a_large_set_is_not_converted_as_a_whole(monkeypatch):
    monkeypatch.setattr(module, "CACHED_CELLS", images().numel() - 1)
    data = Examples(images(), labels())
    data.batch(torch.tensor([0]))
    assert "_prepared_inputs" not in vars(data)


def test_the_cache_does_not_travel():
    data = Examples(images(), labels(), Normalize.from_images(images()))
    before = len(pickle.dumps(data))
    expected, _ = data.batch(torch.arange(6))
    _ = data.label_set
    assert len(pickle.dumps(data)) - before < images().numel()
    again, _ = pickle.loads(pickle.dumps(data)).batch(torch.arange(6))
    assert torch.equal(again, expected)


def test_changing_a_batch_does_not_change_the_data():
    data = Examples(torch.ones(4, 2), torch.zeros(4, dtype=torch.int64))
    data.batch(torch.arange(4))[0].zero_()
    assert data.batch(torch.arange(4))[0].eq(1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_other_inputs_stay_as_they_are(dtype):
    inputs = torch.arange(12).view(6, 2).to(dtype)
    x, _ = Examples(inputs, labels()).batch(torch.tensor([2]))
    assert x.dtype == dtype
    assert torch.equal(x, inputs[2:3])


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32])
def test_tokens_may_be_kept_in_smaller_numbers(dtype):
    inputs = torch.arange(12).view(6, 2)
    for data in (
        Examples(inputs.to(dtype), labels()),
        to_examples((inputs.to(dtype).numpy(), labels())),
        to_examples(Pairs(inputs.to(dtype), labels())),
    ):
        x, _ = data.batch(torch.tensor([5, 2]))
        assert x.dtype == torch.int64
        assert x.tolist() == [[10, 11], [4, 5]]


def test_an_example_may_have_a_label_at_every_position():
    tokens = torch.arange(12).view(4, 3) % 5
    data = to_examples((tokens, tokens))
    _, y = data.batch(torch.tensor([3, 0]))
    assert y.tolist() == [[4, 0, 1], [0, 1, 2]]
    assert (len(data), data.label_set) == (4, (0, 1, 2, 3, 4))
    assert data.select(torch.tensor([1])).labels.tolist() == [[3, 4, 0]]


def test_whatever_gives_batches_itself_is_taken_as_it_is():
    for data in (
        Examples(images(), labels()),
        Windows(torch.arange(9), torch.arange(3), 2),
        ConcatExamples((Examples(images(), labels()),)),
    ):
        assert to_examples(data) is data


def test_select_keeps_the_rows_and_the_settings():
    scale = Normalize.from_images(images())
    part = Examples(images(), labels(), scale).select(np.array([5, 2]))
    assert torch.equal(part.inputs, images()[[5, 2]])
    assert part.label_set == (2,)
    assert (part.scale, len(part)) == (scale, 2)


def test_selected_rows_do_not_carry_the_whole_set_when_pickled():
    part = Examples(images(1000), labels(1000)).select(torch.tensor([1, 2]))
    assert len(pickle.dumps(part)) < images(20).numel()


def augment(data):
    return transform_examples(data, get_augmentation("crop-flip"))


def slow_crop_flip(image, top, left, mirrored):
    _, height, width = image.shape
    out = torch.zeros_like(image)
    for row in range(height):
        for column in range(width):
            source = width - 1 - column if mirrored else column
            y, x = row + top - 4, source + left - 4
            if 0 <= y < height and 0 <= x < width:
                out[:, row, column] = image[:, y, x]
    return out


def test_crop_flip_gives_one_of_the_162_views_of_each_image():
    raw = images(40, channels=2, size=6)
    data = augment(Examples(raw, labels(40)))
    x, y = data.batch(torch.arange(40), seeded())
    seen = set()
    for image, view in zip(raw, (x * 255).round().byte(), strict=True):
        matches = [
            (top, left, mirrored)
            for top in range(9)
            for left in range(9)
            for mirrored in (False, True)
            if torch.equal(slow_crop_flip(image, top, left, mirrored), view)
        ]
        assert matches
        seen.add(matches[0])
    assert len({top for top, _, _ in seen}) > 4
    assert len({left for _, left, _ in seen}) > 4
    assert len({mirrored for _, _, mirrored in seen}) == 2
    assert torch.equal(y, labels(40))


def test_crop_flip_draws_two_offsets_and_a_bit_for_each_image_in_this_order():
    """So runs with this augmentation keep their bits."""
    raw = images(30, size=6)
    generator = seeded(7)
    top, left = (torch.randint(9, (30,), generator=generator).tolist() for _ in range(2))
    mirrored = torch.randint(2, (30,), generator=generator).tolist()
    views = [slow_crop_flip(*view) for view in zip(raw, top, left, mirrored, strict=True)]
    x, _ = augment(Examples(raw, labels(30))).batch(torch.arange(30), seeded(7))
    assert x.equal(torch.stack(views).float() / 255)


def test_crop_flip_reaches_every_offset_and_both_sides_evenly():
    spot = torch.zeros(1, 1, 9, 9, dtype=torch.uint8)
    spot[0, 0, 4, 4] = 255
    data = augment(Examples(spot, torch.zeros(1, dtype=torch.int64)))
    x, _ = data.batch(torch.zeros(4000, dtype=torch.int64), seeded())
    places = x.mean(0)[0]
    assert torch.allclose(places, torch.full((9, 9), 1 / 81), atol=0.01)


def test_crop_flip_mirrors_half_of_the_images():
    edge = torch.zeros(1, 1, 1, 30, dtype=torch.uint8)
    edge[..., :10] = 255
    data = augment(Examples(edge, torch.zeros(1, dtype=torch.int64)))
    x, _ = data.batch(torch.zeros(2000, dtype=torch.int64), seeded())
    bright_left, bright_right = x[..., :15].sum((1, 2, 3)), x[..., 15:].sum((1, 2, 3))
    inside = bright_left + bright_right > 0
    assert (bright_right > bright_left)[inside].float().mean().item() == pytest.approx(0.5, abs=0.1)


def test_augmentation_follows_the_generator_and_spares_evaluation():
    data = augment(Examples(images(), labels()))
    rows = torch.arange(6)
    first, again, other = (data.batch(rows, seeded(s))[0] for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(data.batch(rows)[0], images().float() / 255)


def test_no_augmentation_draws_nothing():
    generator = seeded()
    Examples(images(), labels()).batch(torch.arange(6), generator)
    assert torch.equal(generator.get_state(), seeded().get_state())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"labels": labels(5)}, "6 inputs and 5 labels"),
        ({"labels": labels().float()}, "int64 class numbers, got torch.float32"),
        ({"labels": labels().view(6, 1)}, r"1-D.*shape \(6, 1\)"),
        ({"inputs": torch.zeros(6, 2), "scale": Normalize((0.0,), (1.0,))}, "only images"),
        ({"scale": Normalize((0.0,) * 2, (1.0,) * 2)}, "2 channels but the images have 3"),
    ],
)
def test_examples_that_do_not_fit_are_refused(arguments, words):
    with pytest.raises(DataError, match=words):
        Examples(**{"inputs": images(), "labels": labels(), **arguments})


# as_examples


def test_as_examples_keeps_examples():
    data = Examples(images(), labels())
    assert to_examples(data) is data
    wrapped = DatasetExamples(Pairs(images(), labels()))
    assert to_examples(wrapped) is wrapped


def forms():
    x, y = images().float() / 255, labels()
    pairs = [(x[i], int(y[i])) for i in range(6)]
    return {
        "tensors": (x, y),
        "arrays": (x.double().numpy(), y.int().numpy()),
        "list": [x, y],
        "tensor dataset": TensorDataset(x, y),
        "bytes": (images(), y),
        "dataset": Pairs(x, y),
        "plain items": Pairs([i.numpy() for i, _ in pairs], [j for _, j in pairs]),
        "byte dataset": Pairs(images(), y),
    }


@pytest.mark.parametrize("form", forms())
def test_every_form_of_the_same_data_gives_the_same_batches(form):
    data = to_examples(forms()[form])
    x, y = data.batch(torch.tensor([3, 0]))
    assert torch.equal(x, images()[[3, 0]].float() / 255)
    assert torch.equal(y, torch.tensor([0, 0]))
    assert (x.dtype, y.dtype, len(data)) == (torch.float32, torch.int64, 6)
    assert (data.label_set, data.labels.tolist()) == ((0, 1, 2), labels().tolist())
    part = data.select(np.array([1, 4]))
    assert (len(part), part.label_set) == (2, (1,))
    assert torch.equal(part.batch(torch.tensor([1]))[0], images()[[4]].float() / 255)


def test_a_tensor_dataset_takes_the_fast_path():
    assert isinstance(to_examples(TensorDataset(images(), labels())), Examples)


class Stream(IterableDataset):
    """Has no rows."""

    def __iter__(self):
        return iter([])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("mnist", "type str.*pass"),
        ((images(), labels(), labels()), "type tuple"),
        (Stream(), "map-style"),
        (DataLoader(TensorDataset(images(), labels())), "pass its .dataset"),
        ((images(), np.array(["a"] * 6)), "targets must be numbers, got an array of <U1"),
        ((images(), labels(5).float()), "one row for each example, .* 5, 6"),
        ((np.array([None] * 6), labels()), "numbers, got an array of object"),
        ((images(), labels(5)), "6 inputs and 5 labels"),
        ((torch.tensor([[1.0], [float("nan")]]), labels(2)), "finite.*1 NaN"),
        ((np.array([[1.0], [np.inf]]), labels(2)), "finite.*1 NaN or infinite of 2"),
        (TensorDataset(images()), "cannot be used"),
    ],
)
def test_other_data_are_refused(data, words):
    with pytest.raises(DataError, match=words):
        to_examples(data)


# DatasetExamples


def test_labels_are_read_from_targets_without_touching_the_items():
    dataset = WithTargets(images(), labels().tolist())
    assert to_examples(dataset).label_set == (0, 1, 2)
    assert to_examples(Subset(dataset, [1, 4])).label_set == (1,)
    assert to_examples(dataset).select(torch.tensor([5, 3])).labels.tolist() == [2, 0]
    assert dataset.reads == 0


def test_labels_beside_the_items_are_read_once():
    dataset = Pairs(images(), labels())
    data = to_examples(dataset)
    assert data.labels.tolist() == data.labels.tolist() == labels().tolist()
    assert data.select(torch.tensor([2])).label_set == (2,)
    assert dataset.reads == 6


def test_a_subset_of_rows_reads_only_its_own_labels():
    dataset = Pairs(images(), labels())
    assert to_examples(dataset).select(torch.tensor([2, 5])).label_set == (2,)
    assert dataset.reads == 2


def test_a_target_transform_is_not_passed_over():
    dataset = WithTargets(images(), labels().tolist())
    dataset.target_transform = lambda label: label + 10
    assert to_examples(dataset).label_set == (10, 11, 12)
    assert to_examples(Subset(dataset, [1])).label_set == (11,)


@pytest.mark.parametrize("kept", [["a", "b"], [0, 1], [0.5] * 6, [[1], [1, 2]]])
def test_targets_that_are_not_the_labels_are_passed_over(kept):
    dataset = Pairs(images(), labels())
    dataset.targets = kept
    assert to_examples(dataset).labels.tolist() == labels().tolist()


def test_random_transforms_follow_the_generator():
    data = to_examples(Noisy(torch.zeros(4, 2), labels(4)))
    rows = torch.arange(4)
    first, again, other = (data.batch(rows, seeded(s))[0] for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(data.batch(rows)[0], data.batch(rows)[0])


def test_reading_a_dataset_leaves_the_global_generator_alone():
    data = to_examples(Noisy(torch.zeros(4, 2), labels(4)))
    state = torch.get_rng_state()
    data.batch(torch.arange(4), seeded())
    assert torch.equal(torch.get_rng_state(), state)


# Joined


@given(
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(any),
    draw=st.data(),
)
def test_joined_data_are_those_of_one_set_after_another(sizes, draw):
    whole, ends = images(sum(sizes)), [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    answers = torch.arange(sum(sizes)) * 7 % 5
    spans = [slice(*pair) for pair in itertools.pairwise(ends)]
    kinds = [DatasetExamples(Pairs(whole[s], answers[s])) for s in spans]
    parts = tuple(
        Examples(whole[s], answers[s]) if i % 2 == 0 else kinds[i] for i, s in enumerate(spans)
    )
    joined = ConcatExamples(parts)
    number = st.integers(0, sum(sizes) - 1)
    rows = torch.tensor(draw.draw(st.lists(number, min_size=1, max_size=9)))
    x, y = joined.batch(rows)
    assert torch.equal(x, whole[rows].float() / 255)
    assert torch.equal(y, answers[rows])
    assert (len(joined), joined.labels.tolist()) == (sum(sizes), answers.tolist())
    some = joined.select(rows.numpy())
    last = torch.arange(len(rows)).flip(0)
    assert torch.equal(some.batch(last)[0], x.flip(0))
    assert torch.equal(some.select(last).batch(last)[1], y)
    assert (len(some), some.labels.tolist()) == (len(rows), y.tolist())
    assert some.label_set == tuple(sorted(set(y.tolist())))


def test_joined_data_are_augmented_by_their_parts():
    parts = tuple(augment(Examples(images(4, seed=s), labels(4))) for s in (0, 1))
    rows = torch.tensor([5, 0, 7, 2])
    generator = seeded(3)
    first, second = (
        part.batch(torch.tensor(own), generator)[0]
        for part, own in zip(parts, ([0, 2], [1, 3]), strict=True)
    )
    x, _ = ConcatExamples(parts).batch(rows, seeded(3))
    assert torch.equal(x, torch.stack([second[0], first[0], second[1], first[1]]))
    assert torch.equal(x, ConcatExamples(parts).batch(rows, seeded(3))[0])
    assert not torch.equal(x, ConcatExamples(parts).batch(rows, seeded(4))[0])
    assert torch.equal(ConcatExamples(parts).batch(rows)[0][1], images(4).float()[0] / 255)


class Silent(Dataset):
    """Does not say how long it is."""

    def __getitem__(self, row):
        return torch.zeros(1), 0


class Dicts(Pairs):
    """Items as Hugging Face's sets have them."""

    def __getitem__(self, row):
        return {"x": 1, "z": 2}


class Triples(Pairs):
    def __getitem__(self, row):
        return torch.zeros(1), torch.zeros(1), 0


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (Silent(), "must know its length"),
        (Triples(images(), labels()), r"a pair \(input, target\) or a dict, got 3 values"),
        (Dicts(images(), labels()), r"its entry 'labels' .* got a dict with 'x'"),
        (Pairs(["picture"], [0]), "tensors, arrays or numbers, got str"),
        (Pairs([torch.zeros(2), torch.zeros(3)], [0, 0]), r"one shape, got \(2,\) and \(3,\)"),
        (Pairs(images(), ["cat"] * 6), "tensors, arrays or numbers, got str"),
    ],
)
def test_items_that_cannot_be_used_are_refused(dataset, words):
    with pytest.raises(DataError, match=words):
        to_examples(dataset).batch(torch.arange(len(dataset.inputs)))
