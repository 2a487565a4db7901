"""Transforms against slow loops, Pillow, SciPy and colorsys; and the laws that all of them keep."""

import colorsys
import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage
from torch import Tensor
from torch.utils.data import Dataset

import fedquilt as fq
from fedquilt.data import Examples, TransformedExamples, make_pipeline, to_examples
from fedquilt.data.pipeline import AUGMENTATIONS, parse_transform
from fedquilt.data.transformed import transform_examples
from fedquilt.data.transforms import (
    TRANSFORMS,
    CenterCrop,
    ColorJitter,
    Grayscale,
    HorizontalFlip,
    Normalize,
    RandomCrop,
    Resize,
    Rotation,
    ToRGB,
    Transform,
    VerticalFlip,
)
from fedquilt.errors import ConfigError, DataError, FedquiltError
from fedquilt.runs.from_config import load_clients, open_configured_run
from fedquilt.settings.load import load_config
from fedquilt.settings.resolve import load_source

ALL = {
    "CenterCrop": CenterCrop((5, 4)),
    "ColorJitter": ColorJitter(0.4, 0.4, 0.4, 0.1),
    "Grayscale": Grayscale(3),
    "HorizontalFlip": HorizontalFlip(),
    "Normalize": Normalize((0.1, 0.2, 0.3), (0.5, 0.6, 0.7)),
    "RandomCrop": RandomCrop(6, padding=2),
    "Resize": Resize((5, 9)),
    "Rotation": Rotation(30),
    "ToRGB": ToRGB(),
    "VerticalFlip": VerticalFlip(),
}
RANDOM = [name for name, transform in ALL.items() if transform.is_random]
every = pytest.mark.parametrize("transform", ALL.values(), ids=ALL)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def images(count=5, channels=3, height=8, width=8, seed=0):
    return torch.rand(count, channels, height, width, generator=seeded(seed))


def run(transform, x, seed=0, **options):
    return transform.apply(x, transform.draw(x, seeded(seed)), **options)


def test_every_transform_that_has_a_name_is_tested_here():
    assert ALL.keys() == TRANSFORMS.keys()


# oracles


@pytest.mark.parametrize(
    ("old", "new"), [((8, 8), 5), ((8, 8), 13), ((7, 10), (4, 12)), ((3, 3), 1), ((1, 4), (3, 2))]
)
def test_resize_is_that_of_pillow(old, new):
    x = images(2, 3, *old)
    height, width = (new, new) if isinstance(new, int) else new
    y = Resize(new).apply(x)
    for image, resized in zip(x.flatten(0, 1), y.flatten(0, 1), strict=True):
        picture = Image.fromarray(image.numpy(), mode="F")
        expected = np.asarray(picture.resize((width, height), Image.Resampling.BILINEAR))
        np.testing.assert_allclose(resized.numpy(), expected, atol=1e-6)


@pytest.mark.parametrize(("old", "new"), [((8, 8), 5), ((7, 10), (4, 12)), ((2, 2), 6)])
def test_nearest_pixels_are_those_in_the_middle(old, new):
    x = images(2, 1, *old)
    y = Resize(new, mode="nearest").apply(x)
    for row in range(y.shape[2]):
        for column in range(y.shape[3]):
            top = int((row + 0.5) * old[0] / y.shape[2])
            left = int((column + 0.5) * old[1] / y.shape[3])
            assert y[:, 0, row, column].equal(x[:, 0, top, left])


@pytest.mark.parametrize("shape", [(8, 8), (6, 9)])
def test_rotation_is_that_of_scipy_and_counterclockwise(shape):
    x = images(6, 2, *shape)
    rotation = Rotation(80)
    angles = rotation.draw(x, seeded(4))
    y = rotation.apply(x, angles)
    assert (angles.abs() <= 80).all()
    assert (angles > 0).any()
    assert (angles < 0).any()
    for image, turned, angle in zip(x, y, angles.tolist(), strict=True):
        for channel, result in zip(image, turned, strict=True):
            expected = ndimage.rotate(
                np.pad(channel.numpy(), 4), angle, reshape=False, order=1, mode="constant"
            )[4:-4, 4:-4]  # SciPy does not blend with what is outside, unless it is there
            np.testing.assert_allclose(result.numpy(), expected, atol=1e-5)


def test_a_quarter_turn_moves_the_right_side_to_the_top_and_fills_what_was_outside():
    x = images(1, 1, 4, 4)
    quarter = torch.tensor([90.0])
    torch.testing.assert_close(Rotation(90).apply(x, quarter), x.rot90(1, (2, 3)))
    wide = torch.ones(1, 1, 2, 6)
    turned = Rotation(90, fill=0.25).apply(wide, quarter)
    torch.testing.assert_close(turned[0, 0, 0], torch.tensor([0.25, 0.25, 1, 1, 0.25, 0.25]))


def slow_crop(image, top, left, size, padding):
    out = torch.zeros(image.shape[0], *size)
    for row in range(size[0]):
        for column in range(size[1]):
            y, x = row + top - padding, column + left - padding
            if 0 <= y < image.shape[1] and 0 <= x < image.shape[2]:
                out[:, row, column] = image[:, y, x]
    return out


@pytest.mark.parametrize(
    ("transform", "size"),
    [(RandomCrop(5), (5, 5)), (RandomCrop((6, 3), 2), (6, 3)), (RandomCrop(padding=3), (7, 8))],
)
def test_random_crops_are_those_of_a_loop_and_start_everywhere(transform, size):
    x = images(400, 2, 7, 8)
    starts = transform.draw(x, seeded())
    y = transform.apply(x, starts)
    for image, (top, left), part in zip(x[:20], starts.tolist(), y[:20], strict=False):
        assert part.equal(slow_crop(image, top, left, size, transform.padding))
    room = [old + 2 * transform.padding - new + 1 for old, new in zip((7, 8), size, strict=True)]
    assert [sorted(set(column)) for column in starts.T.tolist()] == [list(range(n)) for n in room]


def test_a_center_crop_is_the_middle():
    x = torch.arange(20.0).view(1, 1, 4, 5)
    assert CenterCrop(2).apply(x).flatten().tolist() == [6, 7, 11, 12]
    assert CenterCrop((4, 3)).apply(x)[0, 0, 0].tolist() == [1, 2, 3]


@pytest.mark.parametrize(("transform", "axis"), [(HorizontalFlip(), 3), (VerticalFlip(), 2)])
def test_flips_mirror_about_half_of_the_images(transform, axis):
    x = images(2000, 1, 2, 3)
    y = run(transform, x)
    mirrored = torch.tensor([b.equal(a.flip(axis - 1)) for a, b in zip(x, y, strict=True)])
    kept = torch.tensor([b.equal(a) for a, b in zip(x, y, strict=True)])
    assert (mirrored ^ kept).all()
    assert 900 < int(mirrored.sum()) < 1100


@pytest.mark.parametrize("p", [0.0, 0.1, 0.75, 1.0])
def test_flips_happen_with_their_probability(p):
    drawn = HorizontalFlip(p).draw(images(4000, 1, 1, 1), seeded())
    assert drawn.float().mean().item() == pytest.approx(p, abs=0.02 if 0 < p < 1 else 0)


def jitter_slowly(pixels, brightness, contrast, saturation, hue):
    """One image (H, W, 3), pixel by pixel."""

    def gray(pixel):
        return 0.2989 * pixel[0] + 0.587 * pixel[1] + 0.114 * pixel[2]

    def blend(pixel, other, factor):
        return [min(max(factor * a + (1 - factor) * other, 0), 1) for a in pixel]

    pixels = [blend(pixel, 0, brightness) for pixel in pixels]
    mean = sum(map(gray, pixels)) / len(pixels)
    pixels = [blend(pixel, mean, contrast) for pixel in pixels]
    pixels = [blend(pixel, gray(pixel), saturation) for pixel in pixels]
    shifted = []
    for pixel in pixels:
        h, s, v = colorsys.rgb_to_hsv(*pixel)
        shifted.append(colorsys.hsv_to_rgb((h + hue) % 1, s, v))
    return shifted


def test_color_jitter_is_that_of_a_loop_over_pixels():
    x = images(6, 3, 4, 5)
    x[0, :, 0, 0], x[0, :, 0, 1], x[0, :, 0, 2] = 0, 1, 0.5  # black, white, gray: no hue
    transform = ColorJitter(0.8, 0.7, 0.9, 0.5)
    drawn = transform.draw(x, seeded())
    y = transform.apply(x, drawn)
    for image, result, factors in zip(x, y, drawn.tolist(), strict=True):
        pixels = image.flatten(1).T.tolist()
        expected = torch.tensor(jitter_slowly(pixels, *factors))
        torch.testing.assert_close(result.flatten(1).T, expected, atol=1e-5, rtol=0)
    assert 0 <= float(y.min()) <= float(y.max()) <= 1


def test_jitter_draws_each_factor_from_its_range():
    drawn = ColorJitter(0.5, 2.0, 0.0, 0.25).draw(images(3000, 3, 1, 1), seeded())
    low, high = drawn.amin(0).tolist(), drawn.amax(0).tolist()
    assert low == pytest.approx([0.5, 0, 1, -0.25], abs=0.01)
    assert high == pytest.approx([1.5, 3, 1, 0.25], abs=0.01)


def test_gray_is_the_brightness_and_rgb_repeats_it():
    x = images(2)
    expected = 0.2989 * x[:, 0] + 0.587 * x[:, 1] + 0.114 * x[:, 2]
    for channels in (1, 3):
        y = Grayscale(channels).apply(x)
        assert y.shape[1] == channels
        assert all(torch.allclose(y[:, c], expected) for c in range(channels))
    gray = Grayscale().apply(x)
    assert ToRGB().apply(gray).equal(Grayscale(3).apply(x))
    assert ToRGB().apply(x).equal(x)


# laws


@every
def test_the_same_seed_gives_the_same_bits_and_another_one_others(transform):
    x = images()
    before = x.clone()
    first, again, other = (run(transform, x, seed) for seed in (1, 1, 2))
    assert first.equal(again)
    assert first.equal(other) != transform.is_random
    assert x.equal(before)


@every
def test_what_one_image_becomes_does_not_depend_on_the_others(transform):
    x = images()
    drawn = transform.draw(x, seeded())
    together = transform.apply(x, drawn)
    for row in range(len(x)):
        own = None if drawn is None else drawn[row : row + 1]
        torch.testing.assert_close(transform.apply(x[row : row + 1], own)[0], together[row])


@every
def test_images_are_drawn_where_the_generator_lives_and_stay_where_they_are(transform):
    x = images().to("meta")
    drawn = transform.draw(x, seeded())
    assert drawn is None or drawn.device.type == "cpu"
    assert transform.apply(x, drawn).device.type == "meta"


@every
def test_texts_make_the_same_transform(transform):
    assert parse_transform(repr(transform)) == transform
    assert pickle.loads(pickle.dumps(transform)) == transform
    assert hash(parse_transform(repr(transform))) == hash(transform)


@pytest.mark.parametrize(
    "transform",
    [
        Resize(8),
        CenterCrop(8),
        RandomCrop(8),
        RandomCrop(),
        HorizontalFlip(0),
        VerticalFlip(0.0),
        Rotation(0),
        ColorJitter(),
        ToRGB(),
    ],
    ids=repr,
)
def test_settings_that_ask_for_nothing_change_nothing(transform):
    x = images()
    assert run(transform, x).equal(x)


@pytest.mark.parametrize("name", [n for n, t in ALL.items() if t.is_geometric])
def test_targets_move_with_the_pixels_and_keep_their_values(name):
    transform = ALL[name]
    mask = torch.randint(7, (5, 1, 8, 8), generator=seeded(4)) * 10**15
    drawn = transform.draw(mask, seeded(1))
    moved = transform.apply(mask, drawn, is_target=True)
    assert moved.dtype == torch.int64
    assert set(moved.unique().tolist()) <= {0, *mask.unique().tolist()}
    flat = torch.full((5, 1, 8, 8), 0.5)
    inside = transform.apply(flat, drawn)[:, 0] == 0.5
    assert inside.any()
    # where a pixel came from one place alone, the target comes from there too
    for place in ((2, 3), (5, 5)):
        dot = torch.zeros(5, 1, 8, 8)
        dot[:, :, place[0], place[1]] = 1
        where = transform.apply(dot, drawn) > 0.75
        marked = transform.apply(dot.long() * 3, drawn, is_target=True)
        assert (marked[where] == 3).all()


# chains


def test_evaluation_is_not_random_and_has_the_shapes_of_training():
    x = torch.randint(256, (6, 3, 8, 8), dtype=torch.uint8, generator=seeded())
    chain = ["Resize(7)", "RandomCrop(5)", "HorizontalFlip", "Rotation(9)", "ColorJitter(0.2)"]
    data = transform_examples(Examples(x, torch.arange(6)), make_pipeline(chain))
    rows = torch.tensor([4, 1, 1])
    first, again = data.batch(rows), data.batch(rows)
    assert first[0].equal(again[0])
    assert first[0].equal(CenterCrop(5).apply(Resize(7).apply(x[rows] / 255)))
    training = data.batch(rows, seeded())
    assert training[0].shape == first[0].shape
    assert not training[0][1].equal(training[0][2])  # the same image, drawn twice
    assert training[1].tolist() == [4, 1, 1]


def test_a_chain_is_its_transforms_one_after_another():
    x = torch.randint(256, (6, 3, 8, 8), dtype=torch.uint8, generator=seeded())
    chain = [ALL[name] for name in ("Rotation", "Resize", "ColorJitter", "VerticalFlip")]
    data = transform_examples(Examples(x, torch.arange(6)), make_pipeline(chain))
    expected, generator = x[[3, 0]] / 255, seeded(5)
    for transform in chain:
        expected = transform.apply(expected, transform.draw(expected, generator))
    assert data.batch(torch.tensor([3, 0]), seeded(5))[0].equal(expected)


@pytest.mark.parametrize(
    ("chains", "is_fixed"),
    [
        ((["Resize(4)"], None), True),
        ((["Resize(4)"], ["Resize(4, 'nearest')"]), False),
        ((["HorizontalFlip"], None), False),
        (([abs], [abs]), False),
    ],
)
def test_batches_are_fixed_if_nothing_is_drawn_and_training_is_as_evaluation(chains, is_fixed):
    data = to_examples((images(3), torch.arange(3)))
    assert transform_examples(data, make_pipeline(*chains)).has_fixed_batches == is_fixed


def test_a_name_and_its_chain_are_the_same_and_only_one_may_be_given():
    rows = torch.arange(9)
    named, spelled = (
        load_source(load_config({"data": data})).train.batch(rows, seeded())[0]
        for data in (
            {"augment": "crop"},
            {"transforms": ["RandomCrop(padding=4)"]},
        )
    )
    assert named.equal(spelled)
    with pytest.raises(ConfigError, match=r"'crop' and data.transforms; leave out one"):
        load_source(load_config({"data": {"augment": "crop", "transforms": ["Resize(4)"]}}))
    mirrored = {
        n for n, c in AUGMENTATIONS.items() if any(isinstance(t, HorizontalFlip) for t in c)
    }
    assert mirrored == {"flip", "crop-flip"}


def test_a_normalization_stays_at_the_end_and_is_replaced_by_one_that_is_given():
    x = torch.randint(256, (4, 1, 8, 8), dtype=torch.uint8, generator=seeded())
    own, given = Normalize((0.5,), (0.25,)), Normalize((0.1,), (2.0,))
    data = Examples(x, torch.arange(4), own)
    rows = torch.arange(4)
    kept = transform_examples(data, make_pipeline([Resize(4)]))
    assert kept.scale == own
    assert kept.batch(rows)[0].equal(own.apply(Resize(4).apply(x / 255)))
    other = transform_examples(kept, make_pipeline([given]))
    assert other.scale == given
    assert other.batch(rows, seeded())[0].equal(given.apply(x / 255))
    pair = make_pipeline([Resize(4), given], [Resize(4)])
    assert pair.evaluation == pair.training == (Resize(4), given)


class Counting(Dataset):
    """Images of several sizes, which count how often they are read."""

    def __init__(self, count=12):
        self.targets = torch.arange(count) % 3
        self.read = []

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, row):
        self.read.append(row)
        shade = torch.full((3, 4 + row, 9), row, dtype=torch.uint8)
        return shade, int(self.targets[row])


def test_nothing_is_read_before_a_batch_asks_for_it():
    source = Counting()
    clients = fq.make_clients(source, count=3, transforms=["Resize(6)", "HorizontalFlip"])
    assert set(source.read) <= {0}  # the first one, to check the transforms
    source.read.clear()
    x, y = clients.train[1].batch(torch.tensor([2, 0]), seeded())
    assert len(source.read) == 2
    assert x.shape == (2, 3, 6, 6)
    assert (x[:, 0, 0, 0] * 255).round().int().tolist() == source.read
    assert y.tolist() == source.targets[source.read].tolist()


def test_images_of_several_sizes_need_a_resize_first():
    data = to_examples(Counting())
    with pytest.raises(DataError, match=r"one shape.*begin transforms with Resize"):
        transform_examples(data, make_pipeline(["HorizontalFlip"])).batch(torch.arange(3))


def test_memory_mapped_images_are_not_copied(tmp_path):
    stored = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.uint8, (64, 3, 8, 8))
    stored[:] = np.arange(64)[:, None, None, None]
    x = torch.from_numpy(stored)
    data = transform_examples(Examples(x, torch.arange(64)), make_pipeline(["Resize(512)"]))
    assert data.data.inputs.data_ptr() == x.data_ptr()
    assert data.batch(torch.tensor([7]))[0].shape == (1, 3, 512, 512)
    stored[7] = 99  # what is asked for now is what is there now, or was a moment ago
    assert len(pickle.dumps(data.select(torch.tensor([1])))) < 10**4


def brighten(image):
    assert image.shape == (3, 8, 8)
    return (image + torch.rand(())).clamp(0, 1)


def test_a_function_of_one_image_follows_the_generator():
    x = torch.rand(4, 3, 8, 8, generator=seeded())
    pipeline = make_pipeline([brighten, Resize(4)], ["Resize(4)"])
    data = transform_examples(to_examples((x, torch.arange(4))), pipeline)
    rows = torch.tensor([1, 1, 2])
    before = torch.get_rng_state()
    first, again, other = (data.batch(rows, seeded(seed))[0] for seed in (1, 1, 2))
    assert torch.get_rng_state().equal(before)
    assert first.equal(again)
    assert not first.equal(other)
    assert not first[0].equal(first[1])  # drawn for each image
    assert data.batch(rows)[0].equal(Resize(4).apply(x[rows]))


class Halve(Transform):
    """A transform of a user."""

    def apply(self, images, drawn=None, *, is_target=False):
        return images / 2


def test_own_transforms_and_functions_stand_beside_ours():
    x = torch.rand(4, 3, 8, 8, generator=seeded())
    data = transform_examples(to_examples((x, torch.arange(4))), make_pipeline([Halve(), "ToRGB"]))
    assert data.batch(torch.arange(4))[0].equal(x / 2)


@pytest.mark.parametrize("form", ["image", "pixel_values", "other", "tuple"])
def test_the_images_among_several_inputs_are_transformed_and_the_rest_stays(form):
    x, facts, labels = images(6), torch.rand(6, 4), torch.arange(6)
    inputs = (facts, x) if form == "tuple" else {"facts": facts, form: x}
    data = transform_examples(
        to_examples((inputs, labels)), make_pipeline(["Rotation(9)", "Resize(4)"])
    )
    rows = torch.tensor([5, 2])
    for generator in (seeded(3), None):
        (found, y), drawn = data.batch(rows, generator), Rotation(9).draw(x[rows], seeded(3))
        first, second = found if form == "tuple" else (found["facts"], found[form])
        turned = Rotation(9).apply(x[rows], drawn if generator else None)
        assert second.equal(Resize(4).apply(turned))
        assert first.equal(facts[rows])
        assert y.equal(rows)


def test_one_dict_with_its_target_keeps_its_form():
    data = {"image": images(6), "label": torch.rand(6)}
    clients = fq.make_clients(data, count=2, transforms=["Resize(4)"])
    batch = clients.train[0].batch(torch.arange(2))
    assert batch.as_given()["image"].shape == (2, 3, 4, 4)
    assert batch.as_given()["label"].shape == (2,)


def test_several_images_among_the_inputs_need_a_name():
    data = to_examples(((images(3), images(3)), torch.arange(3)))
    with pytest.raises(DataError, match=r"one entry .* got 2 among 0, 1; call it 'image'"):
        transform_examples(data, make_pipeline(["Resize(4)"]))


def test_a_collate_fn_gets_whole_batches():
    sizes = []

    def collate(items):
        sizes.append(len(items))
        return torch.stack([x[:, :4, :4] / 255 for x, _ in items]), torch.tensor(
            [y for _, y in items]
        )

    clients = fq.make_clients(Counting(), count=1, collate_fn=collate, transforms=["Resize(3)"])
    sizes.clear()
    assert clients.train[0].batch(torch.arange(5))[0].shape == (5, 3, 3, 3)
    assert sizes == [5]


def make_masks():
    """Images whose targets are images: where they are bright."""
    x = (torch.rand(6, 1, 8, 8, generator=seeded()) > 0.5).float()
    return x, x[:, 0].long()


def test_target_images_move_with_their_inputs_if_asked():
    chain = ["RandomCrop(6, padding=2)", "HorizontalFlip", "VerticalFlip", "CenterCrop(5)"]
    data = transform_examples(
        to_examples(make_masks()), make_pipeline(chain, transform_targets=True)
    )
    for generator in (seeded(3), None):
        x, y = data.batch(torch.arange(6), generator)
        assert y.shape == (6, 5, 5)
        assert x[:, 0].long().equal(y)
    assert not data.batch(torch.arange(6), seeded(3))[0].equal(data.batch(torch.arange(6))[0])


def test_masks_in_a_file_move_with_their_images(tmp_path):
    x, y = (tensor.numpy() for tensor in make_masks())
    pixels = (255 * x[:, 0]).astype(np.uint8)
    np.savez(tmp_path / "a.npz", x_train=pixels, y_train=y, x_test=pixels[:2], y_test=y[:2])
    data = {"source": str(tmp_path / "a.npz"), "transforms": ["RandomCrop(6, padding=1)"]}
    with pytest.raises(DataError, match="set transform_targets"):
        load_source(load_config({"data": data}))
    settings = load_config({"data": {**data, "transform_targets": True, "normalize": True}})
    source = load_source(settings)
    images, masks = source.train.batch(torch.arange(6), seeded())
    scale = Normalize.from_images(torch.from_numpy(pixels)[:, None])
    assert source.normalization == scale
    assert images.equal(scale.apply(masks[:, None].float()))


@pytest.mark.parametrize(
    ("data", "arguments", "words"),
    [
        (
            make_masks(),
            {"transforms": ["Resize(4)"]},
            r"shape \(8, 8\).*Resize.*set transform_targets",
        ),
        (
            make_masks(),
            {"transforms": [abs], "test_transforms": [], "transform_targets": True},
            "cannot move targets too, got PerImage.abs",
        ),
        (None, {"transforms": ["Resize(4)"], "transform_targets": True}, "targets of shape"),
        (None, {"transforms": [abs]}, "may be random.*PerImage.abs.*test_transforms="),
        (None, {"transforms": [], "test_transforms": ["Rotation(3)"]}, "must not be random"),
        (None, {"transforms": ["Normalize((0,), (1,))", "Resize(3)"]}, "Normalize comes last"),
        (None, {"transforms": ["Normalize((0,0), (1,1))"]}, "2 channels but the images have 3"),
        (
            None,
            {"transforms": ["Normalize((0,), (1,))"], "test_transforms": ["Normalize((1,), (1,))"]},
            "normalize alike",
        ),
        (None, {"transforms": ["Rezise(3)"]}, "'Rezise' is not known .did you mean 'Resize'"),
        (None, {"transforms": ["Resize(3"]}, "written like a call with plain numbers"),
        (None, {"transforms": ["Resize(__import__('os'))"]}, "plain numbers"),
        (None, {"transforms": ["Resize(3, sides=2)"]}, "settings of Resize.*'sides'"),
        (None, {"transforms": ["Resize(-3)"]}, "'size' of Resize.*greater than"),
        (None, {"transforms": ["Rotation(181)"]}, "'degrees' of Rotation.*less than or equal to"),
        (None, {"transforms": [3]}, "is a value of fedquilt.transforms.*got 3"),
        (None, {"transforms": [Resize]}, "got <class"),
        (None, {"transforms": ["RandomCrop(9)"]}, "at least its size, got 8x8"),
        (None, {"transforms": ["CenterCrop(9)"]}, "at least its size, got 8x8"),
        (None, {"transforms": ["Grayscale", "ColorJitter(hue=0.1)"]}, "three channels, got 1"),
        (
            None,
            {"transforms": [lambda image: image.mean()], "test_transforms": []},
            "make an image .C, H, W. of every image",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_before_training(data, arguments, words):
    data = (images(6), torch.arange(6) % 2) if data is None else data
    with pytest.raises(FedquiltError, match=words):
        fq.make_clients(data, count=2, **arguments)


def test_only_images_are_transformed():
    with pytest.raises(DataError, match="only images"):
        fq.make_clients((torch.rand(6, 4), torch.arange(6)), count=2, transforms=["Resize(4)"])


# runs


def make_model():
    torch.manual_seed(0)
    return fq.make_model("mlp", {"image_size": 6, "in_channels": 3, "hidden": [4]})


def train(clients, **settings):
    method = fq.HeteroFL(fq.LocalTraining(epochs=1, batch_size=4), fraction=1.0)
    settings = {"workers": 0, "rounds": 2, **settings}
    return fq.train(make_model(), torch.zeros(1, 3, 6, 6), method, clients, **settings)


CHAIN = ["Resize(7)", RandomCrop(6), "Rotation(20)", "ColorJitter(0.2, 0.2, 0.2, 0.1)"]


def make_clients(**settings):
    x = torch.randint(256, (18, 3, 8, 8), dtype=torch.uint8, generator=seeded())
    parts = [(x[i::3], torch.arange(6) % 3) for i in range(3)]
    scale = Normalize((0.5,) * 3, (0.2,) * 3)
    settings = {"transforms": [*CHAIN, scale], **settings}
    return fq.make_clients(parts, test=parts[0], budgets=(1.0, 0.5), **settings)


def bits(run):
    return {name: tensor.numpy().tobytes() for name, tensor in run.state.params.items()}


def test_any_number_of_workers_and_a_resumed_run_give_the_same_bits(tmp_path):
    expected = bits(train(make_clients()))
    assert bits(train(make_clients(), workers=2)) == expected
    train(make_clients(), rounds=1, out=tmp_path)
    assert bits(train(make_clients(), rounds=2, out=tmp_path, resume=True)) == expected
    assert bits(train(make_clients(transforms=["Resize(6)"]))) != expected


def test_the_bundle_knows_what_inputs_go_through(tmp_path):
    run = train(make_clients(), out=tmp_path, rounds=1)
    assert run.info.transforms == ("Resize(size=7, mode='bilinear')", "CenterCrop(size=6)")
    assert run.info.normalization == Normalize((0.5,) * 3, (0.2,) * 3)
    again = fq.open_run(tmp_path, make_model(), run.method)
    assert again.info.transforms == run.info.transforms
    assert make_pipeline((), again.info.transforms).evaluation == (Resize(7), CenterCrop(6))


def test_other_data_go_through_the_transforms_of_a_run_from_python(tmp_path):
    digits = fq.load_dataset("digits").take_first(0.05)
    chain = ["Resize(7)", RandomCrop(6), "ToRGB", "ColorJitter(0.2)"]
    clients = fq.make_clients(digits.train, test=digits.test, count=2, transforms=chain)
    run = train(clients, rounds=1, out=tmp_path)
    (loaded,) = load_clients(open_configured_run(tmp_path), "digits").test.values()
    rows = torch.arange(4)
    assert loaded.batch(rows)[0].equal(clients.test[-1].batch(rows)[0])
    assert run.info.normalization == digits.normalization


def test_clients_that_differ_share_no_preprocessing():
    clients = make_clients()
    other = transform_examples(clients.train[0], make_pipeline(["Resize(6)"]))
    assert clients.evaluation_transforms
    assert not fq.Population(clients.clients, {**clients.train, 0: other}, {}).evaluation_transforms


def test_attacks_see_transformed_images_as_pixels():
    clients = make_clients()
    attack = fq.PGD(epsilon=0.1, steps=2).for_examples(clients.train[0])
    x, y = clients.train[0].batch(torch.arange(4), seeded())
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(108, 3))
    near = attack.perturb(net, x, y, seeded())
    pixels, attacked = (t * 0.2 + 0.5 for t in (x, near))
    assert (attacked - pixels).abs().max().item() == pytest.approx(0.1, abs=1e-5)
    assert -1e-5 <= float(attacked.min()) <= float(attacked.max()) <= 1 + 1e-5
    assert isinstance(clients.train[0], TransformedExamples)
    assert isinstance(x, Tensor)
