"""Folders of images of several sizes and domains, which are read when they are asked for."""

from functools import partial

import pytest
import torch
from PIL import Image

import fedquilt as fq
from fedquilt.data import image_folders, load_dataset, make_pipeline
from fedquilt.errors import ConfigError, DataError
from fedquilt.settings.load import load_config
from fedquilt.settings.resolve import build_population, load_source


def picture(path, color, size=(4, 3), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, color).save(path)


def test_pictures_of_different_sizes_are_resized_when_they_are_asked_for(tmp_path):
    picture(tmp_path / "train" / "cat" / "1.png", (10, 20, 30), size=(4, 3))
    picture(tmp_path / "train" / "dog" / "1.png", (40, 50, 60), size=(4, 3))
    picture(tmp_path / "test" / "cat" / "1.png", 7, size=(5, 3), mode="L")
    source = load_dataset(str(tmp_path))
    assert (source.num_classes, source.normalization) == (2, None)
    with pytest.raises(DataError, match=r"one size.*4x3.*5x3; begin transforms with Resize"):
        fq.make_clients(source.train, test=source.test, count=1)
    clients = fq.make_clients(source.train, test=source.test, count=1, transforms=["Resize(2)"])
    x, y = clients.train[0].batch(torch.arange(2))
    colors = {0: [10, 20, 30], 1: [40, 50, 60]}
    assert (x[:, :, 1, 1] * 255).round().tolist() == [colors[label] for label in y.tolist()]
    gray, _ = clients.test[-1].batch(torch.tensor([0]))
    assert (gray * 255).round().unique().tolist() == [7]


DOMAINS = {"real": 10, "sketch": 20}


def save_pictures(folder, layout, count=3):
    """Two domains of two classes; a picture's colors are its domain, its class and its number."""
    for domain, shade in DOMAINS.items():
        lists = {"train": [], "test": []}
        for number, name in enumerate(("axe", "bee")):
            for i in range(count):
                part = "test" if i == 0 else "train"
                below = {"folders": f"{part}/{name}"}.get(layout, name)
                path = folder / domain / below / f"{i}.png"
                picture(path, (shade, number, i), size=(4 + i, 3 + number))
                lists[part].append(f"{path.relative_to(folder)} {number}")
        for part, lines in lists.items() if layout == "lists" else ():
            (folder / f"{domain}_{part}.txt").write_text("\n".join(lines) + "\n")


def colors(data):
    x, y = data.batch(torch.arange(len(data)))
    assert x.shape[1:] == (3, 6, 6)
    pixels = (x[:, :, 3, 3] * 255).round().int()
    assert pixels[:, 1].tolist() == y.tolist()
    return pixels.tolist()


@pytest.mark.parametrize("layout", ["lists", "folders", "classes"])
def test_images_of_domains_are_read_when_they_are_asked_for(tmp_path, layout, monkeypatch):
    save_pictures(tmp_path, layout)
    opened = []
    read = image_folders._open_image
    monkeypatch.setattr(image_folders, "_open_image", lambda f: opened.append(f) or read(f))
    source = load_source(
        load_config({"data": {"source": str(tmp_path), "transforms": ["Resize(6)", "Rotation(9)"]}})
    )
    assert (source.group_names, source.num_classes) == (("real", "sketch"), 2)
    assert {f.name for f in opened} <= {"0.png", "1.png"}  # the first one, for its shape
    num_train = 6 if layout == "classes" else 4
    assert source.groups_train.tolist() == [0] * num_train + [1] * num_train
    clients = build_population(load_config({"data": {"partition": "domain", "clients": 2}}), source)
    assert [client.group for client in clients.clients] == ["real", "sketch"]
    opened.clear()
    for number, shade in enumerate(DOMAINS.values()):
        numbers = (0, 1, 2) if layout == "classes" else (1, 2)
        expected = [[shade, label, i] for label in (0, 1) for i in numbers]
        assert sorted(colors(clients.train[number])) == expected
        if layout != "classes":
            assert sorted(colors(clients.test[number])) == [[shade, 0, 0], [shade, 1, 0]]
    assert len(opened) == 12


def test_domains_without_a_test_part_hold_out_some_images(tmp_path):
    save_pictures(tmp_path, "classes", count=6)
    settings = {"source": str(tmp_path), "transforms": ["Resize(6)"], "partition": "domain"}
    config = load_config({"data": {**settings, "clients": 2, "test_fraction": 0.25}})
    clients = build_population(config, load_source(config))
    assert [(len(clients.train[i]), len(clients.test[i])) for i in (0, 1)] == [(9, 3)] * 2


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("real/axe/9.png 0", "'real/axe/9.png 0'; paths are below"),
        ("real/axe/1.png axe", "path of an image and its class"),
        ("nothing", "path of an image and its class"),
    ],
)
def test_lists_of_domains_are_checked(tmp_path, line, words):
    save_pictures(tmp_path, "lists")
    (tmp_path / "real_train.txt").write_text(line)
    with pytest.raises(DataError, match=words):
        load_dataset(str(tmp_path))


def test_every_domain_needs_its_lists_or_none(tmp_path):
    save_pictures(tmp_path, "lists")
    (tmp_path / "sketch_test.txt").unlink()
    with pytest.raises(DataError, match=r"every domain needs a list.*sketch_test.txt"):
        load_dataset(str(tmp_path))


def test_domains_without_images_are_refused(tmp_path):
    (tmp_path / "real" / "axe").mkdir(parents=True)
    with pytest.raises(DataError, match=r"has folders but no images in <domain>/<class>/"):
        load_dataset(str(tmp_path))


def test_the_normalization_of_images_that_are_not_in_memory_is_given_not_measured(tmp_path):
    save_pictures(tmp_path, "folders")
    data = {"source": str(tmp_path), "transforms": ["Resize(6)"]}
    with pytest.raises(ConfigError, match=r"not in memory.*put Normalize\(mean, std\) at the end"):
        load_source(load_config({"data": {**data, "normalize": True}}))
    scaled = {**data, "transforms": ["Resize(6)", "Normalize((0.5,)*3, (0.5,)*3)"]}
    with pytest.raises(DataError, match="plain numbers"):
        load_source(load_config({"data": scaled}))
    scaled["transforms"][1] = "Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))"
    source = load_source(load_config({"data": scaled}))
    assert source.normalization is not None
    assert float(source.train.batch(torch.tensor([0]))[0].min()) < -0.9


SIX = ("real", "clipart", "infograph", "painting", "quickdraw", "sketch")
NUMBERS = {"axe": 11, "bird": 21, "zebra": 344}  # in the lists; an axe is none of the ten classes


@pytest.mark.parametrize("layout", ["lists", "folders"])
def test_domainnet_is_ten_classes_in_six_domains_of_equal_size(tmp_path, layout):
    """Colors are the domain, the class and the number of a picture."""
    root = tmp_path / "domainnet"
    for shade, domain in enumerate(SIX):
        for part, count in (("train", 20 + shade), ("test", 4)):
            lines = []
            for name, number in NUMBERS.items():
                for i in range(count):
                    below = f"{part}/{name}" if layout == "folders" else name
                    path = root / domain / below / f"{part}-{i}.png"
                    picture(path, (shade, number % 256, i), size=(6 + shade, 6))
                    lines.append(f"{path.relative_to(root)} {number}")
            if layout == "lists":
                (root / f"{domain}_{part}.txt").write_text("\n".join(lines))
    load = partial(load_dataset, "domainnet", folder=tmp_path)
    source = load().with_transforms(make_pipeline(["Resize(6)"]))
    assert source.group_names == SIX
    assert source.num_classes == 10
    for data, groups, count in (
        (source.train, source.groups_train, 40),
        (source.test, source.groups_test, 8),
    ):
        assert groups.bincount().tolist() == [count] * 6
        x, y = data.batch(torch.arange(len(data)))
        pixels = (x[:, :, 3, 3] * 255).round().int()
        assert pixels[:, 0].tolist() == groups.tolist()
        assert set(zip(pixels[:, 1].tolist(), y.tolist(), strict=True)) == {(21, 0), (88, 9)}
        assert len({tuple(row) for row in pixels.tolist()}) == len(y)  # none is drawn twice
    _, labels = source.train.batch(torch.arange(len(source.train)))
    for block in labels.split(20):  # a client's part of a domain, in the order of the file
        assert 0 < int((block == 0).sum()) < 20
    _, again = load().with_transforms(make_pipeline(["Resize(6)"])).train.batch(torch.arange(240))
    assert again.equal(labels)


def test_a_missing_domainnet_says_where_it_is_looked_for(tmp_path):
    with pytest.raises(DataError, match=r"folder 'domainnet'.*FEDQUILT_DATA"):
        load_dataset("domainnet", folder=tmp_path)
