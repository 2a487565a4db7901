"""Loading: named sets, files, folders, and a clear sentence for everything that is wrong."""

import re
import sys
import types

import numpy as np
import pytest
import torch
from PIL import Image

from fedquilt.data import load_dataset
from fedquilt.data.hub import to_arrays
from fedquilt.data.pipeline import get_augmentation
from fedquilt.errors import DataError


@pytest.fixture(autouse=True)
def _no_data_but_ours(monkeypatch, tmp_path):
    monkeypatch.delenv("FEDQUILT_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def arrays(shape=(6, 5), train=9, test=3, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "x_train": rng.integers(0, 256, (train, *shape), dtype=np.uint8),
        "y_train": np.arange(train) % 3,
        "x_test": rng.integers(0, 256, (test, *shape), dtype=np.uint8),
        "y_test": np.arange(test) % 3,
    }


def save(path, **content):
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **content)
    return path


# digits


def test_digits_are_split_within_each_class_the_same_way_every_time():
    digits = load_dataset("digits")
    share = (
        digits.test.labels.bincount()
        / torch.cat([digits.train.labels, digits.test.labels]).bincount()
    )
    assert len(digits.train) + len(digits.test) == 1797
    assert share.min() > 0.19
    assert share.max() <= 0.2
    assert torch.equal(digits.test.inputs, load_dataset("digits").test.inputs)
    assert (digits.name, digits.num_classes, digits.group_names) == ("digits", 10, ())


def test_digits_use_the_whole_range_of_a_byte():
    inputs = load_dataset("digits").train.inputs
    assert (inputs.dtype, tuple(inputs.shape[1:])) == (torch.uint8, (1, 8, 8))
    assert (inputs.min(), inputs.max()) == (0, 255)
    assert len(inputs.unique()) == 17


# npz


def test_grey_images_get_a_channel(tmp_path):
    content = arrays()
    source = load_dataset(str(save(tmp_path / "grey.npz", **content)))
    assert torch.equal(source.train.inputs[:, 0], torch.from_numpy(content["x_train"]))
    assert torch.equal(source.test.labels, torch.from_numpy(content["y_test"]))
    assert (source.name, source.num_classes) == ("grey", 3)
    assert source.groups_train is None
    assert source.groups_test is None


def test_colour_images_get_their_channels_first(tmp_path):
    content = arrays((6, 5, 3))
    source = load_dataset(str(save(tmp_path / "colour.npz", **content)))
    assert source.train.inputs.shape == (9, 3, 6, 5)
    assert torch.equal(
        source.test.inputs[1, 2],
        torch.from_numpy(np.ascontiguousarray(content["x_test"][1, ..., 2])),
    )


def test_training_and_test_images_are_normalised_by_the_training_images(tmp_path):
    source = load_dataset(str(save(tmp_path / "a.npz", **arrays((8, 8, 3)))))
    x, _ = source.train.batch(torch.arange(9))
    torch.testing.assert_close(x.mean((0, 2, 3)), torch.zeros(3), atol=1e-3, rtol=0)
    torch.testing.assert_close(x.square().mean((0, 2, 3)), torch.ones(3), atol=1e-3, rtol=0)
    assert source.test.scale == source.train.scale


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", ">f4"])
def test_floats_are_taken_as_they_are(tmp_path, dtype):
    rows = np.arange(18).reshape(9, 2).astype(dtype)
    source = load_dataset(
        str(save(tmp_path / "rows.npz", **{**arrays(), "x_train": rows, "x_test": rows[:3]}))
    )
    x, _ = source.train.batch(torch.arange(9))
    assert torch.equal(x, torch.arange(18.0).view(9, 2))


def test_gaps_between_labels_are_fine(tmp_path):
    path = save(
        tmp_path / "a.npz", **{**arrays(), "y_train": np.arange(9) * 2 % 18, "y_test": [0, 2, 4]}
    )
    assert load_dataset(str(path)).num_classes == 17


def test_an_empty_test_set_is_fine(tmp_path):
    source = load_dataset(str(save(tmp_path / "a.npz", **arrays(test=0))))
    assert len(source.test) == 0
    assert source.test.inputs.shape == (0, 1, 6, 5)


@pytest.mark.parametrize(
    ("kind", "ids", "names"),
    [("id", [40, 7, 40], ("7", "40")), ("domain", ["web", "photo", "web"], ("photo", "web"))],
)
def test_groups_are_numbered_alike_in_train_and_test(tmp_path, kind, ids, names):
    groups = {f"{kind}_train": np.array(ids * 3), f"{kind}_test": np.array(ids[::-1])}
    source = load_dataset(str(save(tmp_path / "a.npz", **arrays(), **groups)))
    assert source.group_names == names
    assert source.groups_train.tolist() == [1, 0, 1] * 3
    assert source.groups_test.tolist() == [1, 0, 1]


@pytest.mark.parametrize("name", ["client", "id"])
def test_clients_without_a_test_set_are_natural_ones(tmp_path, name):
    content = {key: value for key, value in arrays().items() if key.endswith("train")}
    owners = np.array([5, 2, 5] * 3)
    source = load_dataset(str(save(tmp_path / "a.npz", **content, **{name: owners})))
    assert source.group_names == ("2", "5")
    assert source.groups_train.tolist() == [1, 0, 1] * 3
    assert (len(source.train), len(source.test)) == (9, 0)


def test_a_file_without_a_test_set_must_say_whose_its_examples_are(tmp_path):
    content = {key: value for key, value in arrays().items() if key.endswith("train")}
    with pytest.raises(DataError, match="lacks x_test, y_test"):
        load_dataset(str(save(tmp_path / "a.npz", **content)))


# named sets


def test_a_named_folder_may_be_one_file(tmp_path):
    save(tmp_path / "femnist.npz", **arrays())
    assert len(load_dataset("femnist", folder=tmp_path).train) == 9
    with pytest.raises(DataError, match=r"did you mean 'shakespeare'"):
        load_dataset("shakespear")


def test_named_sets_are_looked_for_in_the_folder_the_environment_and_the_cache(
    tmp_path, monkeypatch
):
    places = [tmp_path / "given", tmp_path / "own", tmp_path / "cache" / "fedquilt"]
    for size, place in enumerate(places, start=1):
        save(place / "mnist.npz", **arrays((size, size)))
    monkeypatch.setenv("FEDQUILT_DATA", str(places[1]))
    for size, place in enumerate(places, start=1):
        source = load_dataset("mnist", folder=places[0])
        assert (source.name, source.train.inputs.shape) == ("mnist", (9, 1, size, size))
        (place / "mnist.npz").unlink()


@pytest.mark.parametrize(
    ("name", "shape", "augment"),
    [
        ("cifar10", (32, 32, 3), "crop-flip"),
        ("cifar100", (32, 32, 3), "crop-flip"),
        ("svhn", (32, 32, 3), "crop-jitter"),
        ("cifar10", (8, 8, 3), "none"),
        ("fashion-mnist", (32, 32, 3), "none"),
    ],
)
def test_color_images_are_augmented_in_training_only(tmp_path, name, shape, augment):
    path = save(tmp_path / f"{name}.npz", **arrays(shape))
    for source in (load_dataset(name, folder=tmp_path), load_dataset(str(path))):
        rows, scale = torch.arange(2), source.normalization
        for part in (source.train, source.test):
            raw = part.data.inputs if augment != "none" else part.inputs
            assert part.batch(rows)[0].equal(scale.apply(raw[:2].float() / 255))
        x = source.train.batch(rows, torch.Generator().manual_seed(1))[0]
        chain = (*get_augmentation(augment).training, scale)
        generator, expected = torch.Generator().manual_seed(1), source.stored_inputs[:2] / 255
        for transform in chain:
            expected = transform.apply(expected, transform.draw(expected, generator))
        assert x.equal(expected)


def test_a_file_without_its_folder_is_found_where_named_sets_are(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    save(tmp_path / "data" / "mine.npz", **arrays((4, 4)))
    monkeypatch.setenv("FEDQUILT_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    assert load_dataset("mine.npz").train.inputs.shape == (9, 1, 4, 4)
    save(tmp_path / "mine.npz", **arrays((5, 5)))  # the current folder comes first
    assert load_dataset("mine.npz").train.inputs.shape == (9, 1, 5, 5)
    for name in ("elsewhere/mine.npz", "other.npz"):
        with pytest.raises(DataError, match="does not exist; check the path"):
            load_dataset(name)


# the hub


def hub_rows(images, labels):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"img": datasets.Image(), "label": datasets.Value("int64")})
    pictures = [Image.fromarray(image) for image in images]
    return datasets.Dataset.from_dict({"img": pictures, "label": labels}, features=features)


@pytest.mark.parametrize("shape", [(6, 5), (6, 5, 3)])
def test_hub_images_become_the_arrays_they_were(shape):
    content = arrays(shape)
    x, y = to_arrays(hub_rows(content["x_train"], content["y_train"]), "img", "label")
    assert (x.dtype, y.dtype) == (np.uint8, np.int64)
    assert np.array_equal(x, content["x_train"])
    assert np.array_equal(y, content["y_train"])


def test_a_hub_column_that_is_gone_is_named():
    with pytest.raises(DataError, match=r"no column 'image', it has: img, label.*--data"):
        to_arrays([{"img": 0, "label": 1}], "image", "label")


def fake_hub(monkeypatch, load_dataset):
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))


def test_a_download_is_cached_whole(tmp_path, monkeypatch):
    content = arrays((32, 32, 3))
    splits = {
        part: [
            {"img": x, "fine_label": y}
            for x, y in zip(content[f"x_{part}"], content[f"y_{part}"], strict=True)
        ]
        for part in ("train", "test")
    }
    asked = []
    fake_hub(monkeypatch, lambda path: asked.append(path) or splits)
    first, second = load_dataset("cifar100"), load_dataset("cifar100")
    assert asked == ["uoft-cs/cifar100"]
    assert [p.name for p in (tmp_path / "cache" / "fedquilt").iterdir()] == ["cifar100.npz"]
    for source in (first, second):
        expected = torch.from_numpy(content["x_train"]).permute(0, 3, 1, 2)
        assert torch.equal(source.stored_inputs, expected)


def test_a_part_of_a_set_is_asked_for_by_name(monkeypatch):
    asked, rows = [], [{"image": np.zeros((2, 2), np.uint8), "label": 0}] * 2
    splits = {"train": rows, "test": rows}
    fake_hub(monkeypatch, lambda *names: asked.append(names) or splits)
    load_dataset("svhn")
    assert asked == [("ufldl-stanford/svhn", "cropped_digits")]


def test_an_interrupted_write_leaves_no_file_behind(tmp_path, monkeypatch):
    rows = [{"image": np.zeros((2, 2), np.uint8), "label": 0}]
    fake_hub(monkeypatch, lambda path: {"train": rows, "test": rows})

    def fail(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez", fail)
    with pytest.raises(KeyboardInterrupt):
        load_dataset("mnist")
    assert list((tmp_path / "cache" / "fedquilt").iterdir()) == []


def test_no_network_names_the_remedy(monkeypatch):
    def unreachable(path):
        raise ConnectionError("many lines of trouble")

    fake_hub(monkeypatch, unreachable)
    with pytest.raises(DataError, match=r"could not be downloaded.*--data path/to/mnist\.npz"):
        load_dataset("mnist")


def test_no_hub_library_names_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        DataError, match=r"pip install 'fedquilt\[hub\]'.*--data path/to/cifar10\.npz"
    ):
        load_dataset("cifar10")


# folders


def test_a_folder_of_files_is_one_domain_each(tmp_path):
    save(tmp_path / "usps.npz", **arrays(train=4, test=2, seed=1))
    save(tmp_path / "mnist.npz", **arrays(train=6, test=3, seed=2))
    source = load_dataset(str(tmp_path))
    assert source.group_names == ("mnist", "usps")
    assert source.groups_train.tolist() == [0] * 6 + [1] * 4
    assert source.groups_test.tolist() == [0] * 3 + [1] * 2
    expected = np.concatenate(
        [arrays(train=n, test=1, seed=s)["x_train"] for n, s in [(6, 2), (4, 1)]]
    )
    assert torch.equal(source.train.inputs[:, 0], torch.from_numpy(expected))


def test_domains_of_different_shapes_are_refused(tmp_path):
    save(tmp_path / "a.npz", **arrays((4, 4)))
    save(tmp_path / "b.npz", **arrays((5, 5)))
    with pytest.raises(DataError, match=r"one shape and type, 'b.npz'.*\(5, 5\).*\(4, 4\)"):
        load_dataset(str(tmp_path))


def picture(path, colour, size=(4, 3), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)


def test_image_folders_are_numbered_by_the_names_of_the_training_classes(tmp_path):
    picture(tmp_path / "train" / "dog" / "1.png", (1, 2, 3))
    picture(tmp_path / "train" / "cat" / "2.png", (4, 5, 6))
    picture(tmp_path / "train" / "cat" / "1.PNG", (7, 8, 9))
    picture(tmp_path / "test" / "dog" / "1.jpg", (10, 10, 10))
    (tmp_path / "train" / "cat" / "notes.txt").write_text("not an image")
    source = load_dataset(str(tmp_path))
    assert source.train.labels.tolist() == [0, 0, 1]
    assert source.train.inputs[:, :, 0, 0].tolist() == [[7, 8, 9], [4, 5, 6], [1, 2, 3]]
    assert source.train.inputs.shape == (3, 3, 3, 4)
    assert source.test.labels.tolist() == [1]


@pytest.mark.parametrize(("other", "channels"), [("L", 1), ("RGB", 3)])
def test_grey_pictures_stay_grey_unless_one_has_colour(tmp_path, other, channels):
    picture(tmp_path / "train" / "cat" / "1.png", 9, mode="L")
    picture(tmp_path / "test" / "cat" / "1.png", 9 if other == "L" else (9, 9, 9), mode=other)
    assert load_dataset(str(tmp_path)).train.inputs.shape == (1, channels, 3, 4)


def test_a_picture_that_cannot_be_read_is_named(tmp_path):
    picture(tmp_path / "train" / "cat" / "1.png", (1, 1, 1))
    (tmp_path / "train" / "cat" / "2.png").write_bytes(b"nothing")
    (tmp_path / "test").mkdir()
    with pytest.raises(DataError, match=r"2\.png' is not a readable image"):
        load_dataset(str(tmp_path))


def test_a_test_class_without_training_pictures_is_refused(tmp_path):
    picture(tmp_path / "train" / "cat" / "1.png", (1, 1, 1))
    picture(tmp_path / "test" / "cow" / "1.png", (1, 1, 1))
    with pytest.raises(DataError, match="has cow in test/ only"):
        load_dataset(str(tmp_path))


def test_folders_without_pictures_are_an_empty_training_set(tmp_path):
    (tmp_path / "train" / "cat").mkdir(parents=True)
    (tmp_path / "test").mkdir()
    with pytest.raises(DataError, match=r"x_train.*is empty"):
        load_dataset(str(tmp_path))


def test_a_folder_with_none_of_them_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"holds none of them; check the path"):
        load_dataset(str(tmp_path))


# refusals


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fashon-mnist", "dataset 'fashon-mnist' is not known.*did you mean 'fashion-mnist'"),
        ("imagenet", "dataset 'imagenet' is not known; choose one of: cifar10.*path of an .npz"),
        ("nowhere.npz", "'nowhere.npz' which does not exist"),
        ("no/where", "'no/where' which does not exist"),
    ],
)
def test_names_and_paths_that_lead_nowhere_are_refused(name, words):
    with pytest.raises(DataError, match=words):
        load_dataset(name)


def test_a_file_that_is_no_npz_is_refused(tmp_path):
    (tmp_path / "a.npz").write_text("x_train")
    with pytest.raises(DataError, match=r"a\.npz' is not a readable .npz file"):
        load_dataset(str(tmp_path / "a.npz"))


def test_a_single_array_is_no_npz(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(3))
    with pytest.raises(DataError, match=r"is not a readable .npz file"):
        load_dataset(str(tmp_path / "a.npy"))


@pytest.mark.parametrize("keep", [0, 50, 700, -40])
def test_a_truncated_file_is_refused(tmp_path, keep):
    path = save(tmp_path / "a.npz", **arrays())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"is not a readable .npz file"):
        load_dataset(str(path))


@pytest.mark.parametrize("compressed", [False, True])
def test_a_file_with_flipped_bytes_is_refused(tmp_path, compressed):
    path = tmp_path / "a.npz"
    (np.savez_compressed if compressed else np.savez)(path, **arrays((20, 20)))
    content = bytearray(path.read_bytes())
    content[300:310] = bytes(255 - byte for byte in content[300:310])
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"is not a readable .npz file"):
        load_dataset(str(path))


class Trap:
    """Leaves a mark if it is ever unpickled."""

    sprung = False

    def __reduce__(self):
        """What a pickle would run."""
        return (setattr, (Trap, "sprung", True))


def test_objects_are_refused_and_never_unpickled(tmp_path):
    path = save(tmp_path / "a.npz", **{**arrays(), "y_train": np.array([Trap()] * 9)})
    with pytest.raises(DataError, match="holds Python objects, which are never unpickled"):
        load_dataset(str(path))
    assert not Trap.sprung


def test_missing_arrays_are_named(tmp_path):
    path = save(tmp_path / "a.npz", x_train=np.zeros(3), y_test=np.zeros(3), client=np.zeros(3))
    with pytest.raises(DataError, match=re.escape("lacks y_train, x_test (it has: client, x_tr")):
        load_dataset(str(path))


NAN = np.full((9, 2), np.nan, dtype=np.float32)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"y_train": np.zeros(8, int)}, "x_train and y_train.*9 inputs and 8 labels"),
        ({"y_test": np.zeros(4, int)}, "x_test and y_test.*3 inputs and 4 labels"),
        (
            {"y_train": np.array(["cat"] * 9)},
            "y_train must hold a class number or .* has <U3",
        ),
        ({"y_train": np.arange(9) - 1}, "y_train must hold class numbers from 0.*-1 to 7"),
        ({"y_train": np.arange(9) + 99_992}, "y_train must hold class numbers.*to 100000"),
        ({"y_train": np.full(9, 2**64 - 1, np.uint64)}, "y_train must hold class numbers"),
        ({"y_test": np.array([0, 1, -2])}, "y_test must hold class numbers from 0"),
        ({"y_test": np.array([0, 5, 7])}, "every label of y_test.*has 5, 7 in y_test only"),
        ({"x_train": np.zeros((0, 6, 5), np.uint8), "y_train": np.zeros(0, int)}, "x_train.*empty"),
        ({"x_train": np.zeros((9, 30), np.uint8)}, r"x_train must be images.*\(9, 30\); reshape"),
        ({"x_train": np.zeros((9, 1, 2, 2, 1), np.uint8)}, "x_train must be images"),
        ({"x_train": np.zeros(9, np.float32)}, "x_train must be images"),
        ({"x_train": np.zeros((9, 6, 5), int)}, "uint8 images or floats, 'a' has int64"),
        ({"x_train": np.zeros((9, 3, 32, 32), np.uint8)}, "channels last.*transpose"),
        ({"x_test": np.zeros((3, 7, 7), np.uint8)}, r"one shape and type.*\(6, 5\).*\(7, 7\)"),
        ({"x_train": NAN, "x_test": NAN[:3]}, "x_train must be finite numbers, got 18 NaN"),
        ({"id_train": np.zeros(9, int)}, "one complete pair"),
        ({"id_train": np.zeros(9, int), "domain_test": np.zeros(3, int)}, "one complete pair"),
        ({"id_train": np.zeros(8, int), "id_test": np.zeros(3, int)}, "id_train.*9 examples"),
        ({"id_train": np.zeros(9, int), "id_test": np.zeros(3)}, "id_test.*float64"),
        ({"id_train": np.zeros(9, int), "id_test": np.arange(3)}, "has 1, 2 in id_test only"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path, changed, words):
    path = save(tmp_path / "a.npz", **{**arrays(), **changed})
    with pytest.raises(DataError, match=words):
        load_dataset(str(path))


def test_a_single_nan_in_the_test_set_is_found(tmp_path):
    floats = {key: np.ones((n, 2)) for key, n in [("x_train", 9), ("x_test", 3)]}
    floats["x_test"][2, 1] = np.nan
    path = save(tmp_path / "a.npz", **{**arrays(), **floats})
    with pytest.raises(DataError, match="x_test must be finite numbers, got 1 NaN"):
        load_dataset(str(path))


def test_every_refusal_is_one_line(tmp_path):
    with pytest.raises(DataError) as refused:
        load_dataset(str(save(tmp_path / "a.npz", **{**arrays(), "x_test": np.zeros(3)})))
    assert "\n" not in str(refused.value)
