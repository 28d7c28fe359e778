"""A tensor's bytes as buffers, compared with the bytes of a contiguous copy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardtree.core import limits
from shardtree.core.lazy import LazyTensor
from shardtree.shell.storage import tensor_buffers
from shardtree.storage import MemoryStorage
from shardtree.testing import STORABLE_DTYPES, bits, random_bits, tensors
from tests.core.trees.samples import assert_caught

# What torch says, once, when it makes a tensor of half-precision complex numbers.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

Buffers = Callable[[torch.Tensor], Iterable[memoryview]]


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """Return a tensor as a model may hold it: transposed, narrowed, strided, expanded."""
    tensor = draw(tensors())
    for _ in range(draw(st.integers(0, 3))):
        if not tensor.ndim:
            return tensor
        axis = draw(st.integers(0, tensor.ndim - 1))
        size = tensor.shape[axis]
        kind = draw(st.sampled_from(["transpose", "narrow", "step", "expand", "select"]))
        if kind == "transpose":
            tensor = tensor.transpose(axis, draw(st.integers(0, tensor.ndim - 1)))
        elif kind == "narrow":
            start = draw(st.integers(0, size))
            tensor = tensor.narrow(axis, start, draw(st.integers(0, size - start)))
        elif kind == "step":
            tensor = tensor[tuple([slice(None)] * axis + [slice(None, None, 2)])]
        elif kind == "expand":
            tensor = tensor.unsqueeze(axis).expand(*tensor.shape[:axis], 2, *tensor.shape[axis:])
        elif size:
            tensor = tensor.select(axis, draw(st.integers(0, size - 1)))
    return tensor


def are_its_bytes(buffers: Buffers, tensor: torch.Tensor) -> None:
    found = list(buffers(tensor))
    assert all(part.c_contiguous and part.nbytes == len(part) for part in found)
    assert b"".join(found) == bits(tensor)


@given(views())
def test_buffers_join_to_the_bytes_of_a_contiguous_copy(tensor: torch.Tensor) -> None:
    are_its_bytes(tensor_buffers, tensor)


def test_buffers_catch_memory_order() -> None:
    def in_memory_order(tensor: torch.Tensor) -> Iterator[memoryview]:
        raw = bits(torch.as_strided(tensor, (tensor.numel(),), (1,)))
        yield memoryview(raw)

    def transposed(shape: tuple[int, int]) -> torch.Tensor:
        return random_bits(shape, torch.int16).T

    cases = st.tuples(st.integers(1, 4), st.integers(1, 4)).map(transposed)
    assert_caught(are_its_bytes, in_memory_order, cases)


@pytest.mark.parametrize("limit", [1, 8, 24, 100])
@given(views())
def test_a_tensor_that_is_staged_in_parts_is_the_same(limit: int, tensor: torch.Tensor) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "COPIED_BYTES", limit)
        are_its_bytes(tensor_buffers, tensor)


@pytest.mark.parametrize("limit", [16, 48, 200])
def test_staged_parts_keep_to_their_limit(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "COPIED_BYTES", limit)
    tensor = random_bits((6, 5, 4), torch.int64).permute(2, 0, 1)
    found = list(tensor_buffers(tensor))
    assert max(part.nbytes for part in found) <= limit
    assert b"".join(found) == bits(tensor)


@pytest.mark.parametrize("dtype", STORABLE_DTYPES, ids=str)
def test_every_dtype_has_bytes(dtype: torch.dtype) -> None:
    are_its_bytes(tensor_buffers, random_bits((3, 4), dtype, seed=5).T)
    are_its_bytes(tensor_buffers, random_bits((), dtype, seed=5))
    assert list(tensor_buffers(torch.empty((2, 0, 3), dtype=dtype))) == []


def test_a_contiguous_tensor_is_not_copied() -> None:
    tensor = torch.arange(10)
    [buffer] = tensor_buffers(tensor)
    tensor[3] = 77
    assert bytes(buffer) == bits(tensor)
    [part] = tensor_buffers(tensor[2:4])
    assert (part.nbytes, bytes(part)) == (16, bits(tensor[2:4]))


def test_a_gradient_does_not_stand_in_the_way() -> None:
    weight = torch.nn.Parameter(torch.randn(3, 2))
    are_its_bytes(tensor_buffers, weight)
    are_its_bytes(tensor_buffers, weight.T)


@pytest.mark.parametrize("shape", [(), (4,), (3, 2)])
def test_a_conjugate_and_a_negative_view_are_resolved(shape: tuple[int, ...]) -> None:
    numbers = torch.randn(shape, dtype=torch.complex64)
    assert numbers.conj().is_conj()
    assert numbers.conj().imag.is_neg()
    for tensor in (numbers.conj(), numbers.conj().imag, numbers.conj().mT if len(shape) == 2 else numbers):
        found = torch.frombuffer(bytearray().join(tensor_buffers(tensor)), dtype=tensor.dtype).view(tensor.shape)
        assert torch.equal(found, tensor.resolve_conj().resolve_neg())


def stored(tensor: torch.Tensor) -> LazyTensor:
    """Return a tensor that is read from memory when it is asked for."""
    import shardtree

    storage = MemoryStorage()
    shardtree.save({"w": shardtree.ShardedTensor.from_rank_offsets("w", tensor)}, storage)
    lazy = shardtree.open_checkpoint(storage)["w"].data
    assert isinstance(lazy, LazyTensor)
    return lazy


@pytest.mark.parametrize("limit", [16, 2**20])
def test_a_lazy_tensor_is_read_part_by_part(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LAZY_BYTES", limit)
    tensor = random_bits((4, 6), torch.int32)
    lazy = stored(tensor)
    assert b"".join(tensor_buffers(lazy)) == bits(tensor)
    assert b"".join(tensor_buffers(lazy.transpose(0, 1)[1:4])) == bits(tensor.T[1:4])
    assert max(part.nbytes for part in tensor_buffers(lazy)) <= max(limit, 24)


@pytest.mark.parametrize(("rows", "sizes"), [(100, [100, 100, 100]), (200, [128, 128, 44]), (299, [256, 44])])
def test_parts_of_a_lazy_tensor_end_between_blocks(
    rows: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LAZY_BYTES", 4 * rows)
    assert [part.nbytes // 4 for part in tensor_buffers(stored(torch.ones(300, 1)))] == sizes
