"""What may be cut, what may not, and how it is asked for."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedquilt.errors import StructureError, StructureWarning
from fedquilt.structure.create import declare_structure, trace_structure
from fedquilt.structure.cut import build_module
from fedquilt.structure.groups import count_leading, has_group
from fedquilt.structure.mask import mask_model
from fedquilt.structure.structure import Structure
from fedquilt.structure.tensors import find_tensors

from .nets import CLASSES, IMAGE, VECTOR, ZOO, inputs_for, plain_cnn, roughened, structured

WITH_CLASSES = sorted(ZOO.keys() - {"generator", "u-net", "super-resolution"})


class Middle(nn.Module):
    """Two linear layers and a function between them."""

    def __init__(self, function, width: int = 8) -> None:
        super().__init__()
        self.first, self.hidden = nn.Linear(8, 12), nn.Linear(12, width)
        self.function, self.last = function, nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.hidden(torch.relu(self.first(x)))))


@pytest.fixture
def structure() -> Structure:
    return trace_structure(Middle(nn.ReLU(), width=7), VECTOR)


@pytest.mark.parametrize("name", ZOO)
def test_inputs_and_outputs_are_never_cut(name):
    model, structure = structured(name)
    inputs = inputs_for(ZOO[name].example)
    small = build_module(model, structure, structure.subnet(0.01))
    few, all_of_them = (find_tensors(net(*inputs)) for net in (small, model))
    assert [out.shape for out in few] == [out.shape for out in all_of_them]


@pytest.mark.parametrize("name", WITH_CLASSES)
def test_classes_are_a_group_of_their_own_whose_rows_are_in_order(name):
    _, structure = structured(name)
    group = structure.groups[structure.classes]
    assert not group.is_cut
    rows = [axes[0] for axes in structure.axes.values() if axes and has_group(axes[0], group.name)]
    assert rows
    assert all([c for s in axis for c in s.channels] == list(range(group.size)) for axis in rows)


def test_a_subnet_may_keep_some_classes_when_they_are_listed():
    model = roughened(Middle(nn.ReLU()))
    structure = trace_structure(model, VECTOR)
    small = build_module(model, structure, structure.subnet(channels={structure.classes: [1, 3]}))
    x = torch.randn(2, 8)
    torch.testing.assert_close(small(x), model(x)[:, [1, 3]])


@given(size=st.integers(1, 10**5), numerator=st.integers(1, 1000))
def test_a_width_keeps_as_many_channels_as_its_share_rounded_up(size, numerator):
    assert count_leading(size, numerator / 1000) == -(-size * numerator // 1000)


@given(size=st.integers(1, 10**4), width=st.floats(1e-12, 1))
def test_every_width_keeps_at_least_one_channel_and_at_most_all(size, width):
    assert 1 <= count_leading(size, width) <= size


@pytest.mark.parametrize("width", [0.5, 0.3, 0.01, 1 / 3])
def test_a_width_keeps_leading_channels_of_every_group(structure, width):
    subnet = structure.subnet(width)
    for name, group in structure.groups.items():
        count = math.ceil(width * group.size) if group.is_cut else group.size
        assert structure.kept_count(subnet, name) == count
        if count < group.size:
            assert subnet.channels(name).tolist() == list(range(count))


def test_a_group_can_have_a_width_of_its_own(structure):
    subnet = structure.subnet({"hidden": 0.5})
    assert (structure.kept_count(subnet, "hidden"), structure.kept_count(subnet, "first")) == (
        4,
        12,
    )


def test_listed_channels_replace_those_of_the_width(structure):
    subnet = structure.subnet(0.5, channels={"hidden": [6, 2]})
    assert subnet.channels("hidden").tolist() == [2, 6]
    assert subnet.channels("first").tolist() == list(range(6))


@pytest.mark.parametrize("width", [0, -1, 2, math.nan, {"hidden": 0}, {"first": 1.5}])
def test_widths_outside_their_range_are_refused(structure, width):
    with pytest.raises(StructureError, match=r"fractions in \(0, 1\]"):
        structure.subnet(width)


def test_unknown_groups_are_refused_and_the_known_ones_named(structure):
    for asked in ({"width": {"neck": 0.5}}, {"channels": {"neck": [0]}}):
        with pytest.raises(StructureError, match=r"no width group 'neck'.* first, hidden"):
            structure.subnet(**asked)


@pytest.mark.parametrize("channels", [[], [1, 1], [7], [-1]])
def test_impossible_lists_of_channels_are_refused(structure, channels):
    with pytest.raises(StructureError, match="channels 0 to 6"):
        structure.subnet(channels={"hidden": channels})


class Spectrum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(x).real


def test_an_operation_that_cannot_be_followed_is_named_with_its_module_and_the_remedy():
    with pytest.raises(StructureError, match=r"'function' uses .*fft.*exclude=\['function'\]"):
        trace_structure(Middle(Spectrum()), VECTOR)


def test_an_operation_of_the_model_itself_has_another_remedy():
    with pytest.raises(StructureError, match=r"'Middle' uses .*fft.*module of its own"):
        trace_structure(Middle(lambda x: torch.fft.fft(x).real), VECTOR)


def test_an_excluded_module_and_what_it_meets_are_shared_whole():
    model = roughened(Middle(Spectrum()))
    structure = trace_structure(model, VECTOR, exclude=["function"])
    assert structure.cut_groups() == ["first"]
    subnet = structure.subnet(0.5)
    x = torch.randn(2, 8)
    torch.testing.assert_close(
        build_module(model, structure, subnet)(x), mask_model(model, structure, subnet)(x)
    )


def test_excluding_an_unknown_module_is_refused():
    with pytest.raises(StructureError, match="'neck', which the model does not have"):
        trace_structure(Middle(nn.ReLU()), VECTOR, exclude=["neck"])


class Keyword(nn.Module):
    """Calls a module by keyword, as many libraries do."""

    class Inner(nn.Module):
        def forward(self, *, values: Tensor) -> Tensor:
            return torch.fft.fft(values).real

    def __init__(self) -> None:
        super().__init__()
        self.inner = self.Inner()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(values=x)


def test_a_module_that_is_called_by_keyword_can_be_excluded():
    structure = trace_structure(Middle(Keyword()), VECTOR, exclude=["function.inner"])
    assert structure.cut_groups() == ["first"]


PLACED = {
    "made places": lambda x: x * torch.arange(x.shape[1]),
    "given places": lambda x: x * torch.linspace(0, 1, 8),
    "sorted": lambda x: x.sort(dim=1).values,
    "largest": lambda x: x * (x >= x.topk(2, dim=1).values[:, -1:]),
    "softmax": lambda x: x.softmax(1),
    "sum so far": lambda x: x.cumsum(1),
    "turned": lambda x: x.roll(1, dims=1),
    "reversed": lambda x: x.flip(1),
    "picked": lambda x: x[:, [1, 0, 3, 2, 5, 4, 7, 6]],
    "place of the maximum": lambda x: x * x.argmax(1, keepdim=True),
    "place beside the maximum": lambda x: x * x.max(1, keepdim=True).indices,
    "first of all": lambda x: x + x[:, :1],
}


@pytest.mark.parametrize("name", PLACED)
def test_channels_whose_place_matters_are_never_cut(name):
    with pytest.warns(StructureWarning):
        structure = trace_structure(Middle(PLACED[name]), VECTOR)
    assert structure.cut_groups() == ["first"]


def test_images_whose_channels_come_last_in_memory_are_like_others():
    torch.manual_seed(0)
    model = plain_cnn()
    last = IMAGE.contiguous(memory_format=torch.channels_last)
    found, expected = (trace_structure(model, example) for example in (last, IMAGE))
    assert found.axes == expected.axes
    assert found.is_exact


@pytest.mark.parametrize("how", ["amax", "max", "min", "median", "logsumexp", "prod"])
def test_one_value_of_all_channels_does_not_depend_on_their_places(how):
    def function(x: Tensor) -> Tensor:
        found = getattr(x, how)(dim=1, keepdim=True)
        return x * (found if isinstance(found, Tensor) else found.values)

    structure = trace_structure(Middle(function), VECTOR)
    assert structure.cut_groups() == ["first", "hidden"]
    assert not structure.is_exact  # a channel of zeros may be the largest


def test_a_size_in_the_code_is_refused_with_the_place_and_the_remedy():
    model = Middle(lambda x: x.view(len(x), 4, 2).transpose(1, 2).reshape(-1, 8))
    with pytest.raises(StructureError, match=r"'Middle' says.*module of its own"):
        trace_structure(model, VECTOR)


class Reshaping(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(len(x), 4, 2).transpose(1, 2).reshape(-1, 8)


def test_a_module_with_a_size_in_its_code_works_when_excluded():
    with pytest.raises(StructureError, match=r"exclude=\['function'\]"):
        trace_structure(Middle(Reshaping()), VECTOR)
    assert trace_structure(Middle(Reshaping()), VECTOR, exclude=["function"]).cut_groups() == [
        "first"
    ]


def test_a_model_without_hidden_channels_is_refused():
    with pytest.raises(StructureError, match="no channels of Linear can be cut"):
        trace_structure(nn.Linear(8, 3), VECTOR)


def test_a_model_that_gives_no_tensors_is_refused():
    class Silent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))

        def forward(self, x: Tensor) -> str:
            return str(self.net(x))

    with pytest.raises(StructureError, match="holds no tensors"):
        trace_structure(Silent(), VECTOR)


def test_noise_that_the_model_draws_disturbs_nothing():
    model = Middle(lambda x: x + torch.randn_like(x))
    assert trace_structure(model, VECTOR).cut_groups() == ["first", "hidden"]


def test_a_number_that_no_output_depends_on_is_no_scale():
    _, structure = structured("attention with attributes, equal numbers")
    found = {size.attribute for size in structure.size_attributes}
    assert "scale" in found
    assert not found & {"drop_rate", "heads"}


def test_unused_parameters_are_shared_whole():
    _, structure = structured("unused parameter")
    assert structure.axes["spare"] == (None, None)


def test_words_of_an_embedding_are_never_cut():
    _, structure = structured("gru")
    words, features = structure.axes["embed.weight"]
    assert not structure.groups[words[0].group].is_cut
    assert structure.groups[features[0].group].is_cut


def test_running_statistics_are_known():
    _, structure = structured("plain cnn")
    assert structure.statistics == {
        f"{layer}.running_{kind}" for layer in (1, 5) for kind in ("mean", "var")
    }


def test_a_description_names_groups_and_their_tensors(structure):
    assert "hidden: 7: hidden.weight, hidden.bias, last.weight" in structure.describe()
    assert f"last: {CLASSES} (never cut)" in structure.describe()


class Sized(nn.Module):
    """A net that keeps its width in a number."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.hidden, self.last = nn.Linear(8, width), nn.Linear(width, CLASSES)
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.hidden(x)).view(-1, self.width))


DECLARED = {"hidden.weight": ("h", None), "hidden.bias": ("h",), "last.weight": (None, "h")}


def test_a_declared_structure_is_cut_as_stated():
    model = roughened(Sized())
    structure = declare_structure(model, DECLARED, sizes={"width": "h"}, example=VECTOR)
    subnet = structure.subnet(channels={"h": [0, 4]})
    small = build_module(model, structure, subnet)
    assert small.width == 2
    x = torch.randn(3, 8)
    torch.testing.assert_close(small(x), mask_model(model, structure, subnet)(x))


def test_declared_outputs_are_not_cut_and_statistics_are_known():
    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    axes = {f"1.{n}": ("h",) for n in ("weight", "bias", "running_mean", "running_var")}
    axes |= {"0.weight": ("h", None), "0.bias": ("h",)}
    axes |= {"2.weight": ("y", "h"), "2.bias": ("y",)}
    structure = declare_structure(model, axes, classes="y", example=torch.zeros(2, 8))
    assert structure.classes == "y"
    assert structure.cut_groups() == ["h"]
    assert structure.statistics == {"1.running_mean", "1.running_var"}
    with pytest.raises(StructureError, match="'z', which no axis follows"):
        declare_structure(model, axes, classes="z")


@pytest.mark.parametrize(
    ("axes", "sizes", "message"),
    [
        ({"neck.weight": ("h", None)}, {}, "no tensor 'neck.weight'"),
        ({"hidden.weight": ("h",)}, {}, "one width group .* per dimension"),
        ({"hidden.weight": ("h", "h")}, {}, "same number of positions"),
        (DECLARED, {"width": "neck"}, "'neck', which no axis follows"),
        ({"hidden.weight": ("h", None), "hidden.bias": ("h",)}, {}, "not interchangeable|not run"),
        (DECLARED, {}, "does not run"),
    ],
)
def test_a_wrong_declaration_is_refused(axes, sizes, message):
    with pytest.raises(StructureError, match=message):
        declare_structure(Sized(), axes, sizes=sizes, example=VECTOR)
