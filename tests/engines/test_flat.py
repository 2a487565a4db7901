import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedquilt.engines import flat

KINDS = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8]
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(KINDS), SHAPES), max_size=5), st.integers(0, 99))
def test_tensors_of_any_kind_come_back_after_the_file_is_gone(tmp_path_factory, kinds, seed):
    path = tmp_path_factory.mktemp("flat") / "tensors"
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        f"{i}": torch.randint(0, 2, shape, generator=generator).to(kind)
        for i, (kind, shape) in enumerate(kinds)
    }
    slots = flat.write(path, tensors)
    found = flat.read(path, slots)
    path.unlink()
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_what_is_not_contiguous_is_written_in_its_order(tmp_path):
    tensor = torch.arange(12.0).view(3, 4).t()
    slots = flat.write(tmp_path / "t", {"t": tensor})
    assert torch.equal(flat.read(tmp_path / "t", slots)["t"], tensor)
