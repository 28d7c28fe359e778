"""Laws of lazy tensors: a recorded chain reads what torch computes, from boxes that lie inside, and no sooner."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from shardtree.core.lazy import LazyTensor, _make, stored, stored_each
from shardtree.core.lazy._sources import dense
from shardtree.errors import MetadataError, ShapeError, UnsupportedValue

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.bool]
Pair = tuple[LazyTensor, torch.Tensor]
Operation = Callable[[Any], Any]


@dataclass
class Recorder:
    """A stored tensor that remembers which boxes it was asked for."""

    whole: torch.Tensor
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)

    def read_box(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        ends = [low + length for low, length in zip(offset, shape, strict=True)]
        assert all(0 <= low < end <= n for low, end, n in zip(offset, ends, self.whole.shape, strict=True))
        self.boxes.append((offset, shape))
        return self.whole[tuple(map(slice, offset, ends))].clone()

    def lazy(self, name: str = "w") -> LazyTensor:
        return stored(self.read_box, self.whole.shape, self.whole.dtype, name=name)


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    """What equality bit for bit means: NaNs and signed zeros too."""
    dense = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.flatten())
    return tensor.dtype, tensor.shape, dense.view(torch.uint8).numpy().tobytes() if dense.numel() else b""


@st.composite
def recorders(draw: st.DrawFn) -> Recorder:
    shape = torch.Size(draw(st.lists(st.sampled_from([0, 1, 2, 2, 3, 4, 6]), max_size=4)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    values = torch.randn(shape, generator=generator) * 100
    return Recorder(values.to(draw(st.sampled_from(DTYPES))))


@st.composite
def indices(draw: st.DrawFn, shape: torch.Size) -> tuple[Any, ...]:
    entries: list[Any] = []
    for length in shape:
        bound = st.none() | st.integers(-length - 1, length + 1)
        slices = st.builds(slice, bound, bound, st.none() | st.integers(1, 3))
        entries.append(draw(slices | st.integers(-length, length - 1) if length else slices))
    cut = draw(st.integers(0, len(entries)))
    entries = entries[:cut] + ([...] if cut < len(entries) else [])
    if draw(st.booleans()):
        entries.insert(draw(st.integers(0, len(entries))), None)
    return tuple(entries)


def divided(draw: st.DrawFn, length: int) -> tuple[int, int]:
    divisor = draw(st.sampled_from([n for n in range(1, length + 1) if length % n == 0]))
    return divisor, length // divisor


@st.composite
def operations(draw: st.DrawFn, shape: torch.Size) -> Operation:
    """Any recorded operation that fits a shape, as a function that torch tensors and lazy ones both take."""
    anywhere: list[Operation] = [lambda x: x.unsqueeze(-1), torch.squeeze, torch.flatten, torch.detach, torch.ravel]
    anywhere += [lambda x: x.contiguous(), lambda x: x.expand(2, *x.shape), lambda x: x[None, ...]]
    index, dtype = draw(indices(shape)), draw(st.sampled_from(DTYPES))
    anywhere += [lambda x: x[index], lambda x: x[index], lambda x: x.to(dtype), lambda x: x.float().to(dtype=dtype)]
    if not shape:
        return draw(st.sampled_from(anywhere))
    dim, other = (draw(st.integers(-len(shape), len(shape) - 1)) for _ in "ab")
    anywhere += [lambda x: x.transpose(dim, other), lambda x: torch.movedim(x, dim, other)]
    anywhere += [lambda x: x.squeeze(dim), lambda x: torch.unsqueeze(input=x, dim=dim), lambda x: x.flatten(dim)]
    order = draw(st.permutations(range(len(shape))))
    anywhere += [
        lambda x: x.permute(order),
        lambda x: torch.permute(x, tuple(order)),
        lambda x: torch.reshape(x, (-1,)),
    ]
    if not (length := shape[dim]):
        return draw(st.sampled_from(anywhere))
    start = draw(st.integers(0, length - 1))
    count, parts = draw(st.integers(0, length - start)), draw(st.integers(1, length))
    pair = divided(draw, length)
    anywhere += [
        lambda x: torch.narrow(x, dim, start, count),
        lambda x: x.select(dim, start),
        lambda x: x.view(x.shape),
    ]
    first, last = draw(st.none() | st.integers(-9, 9)), draw(st.none() | st.integers(-9, 9))
    anywhere += [lambda x: x[first:last], lambda x: x[start:]]
    anywhere += [lambda x: x.split(parts, dim)[-1], lambda x: torch.chunk(x, parts, dim=dim)[0]]
    anywhere += [lambda x: torch.tensor_split(x, parts, dim)[-1], lambda x: x.unbind(dim)[start]]
    anywhere += [lambda x: torch.split(x, [start, length - start], dim=dim)[0], lambda x: x.unflatten(dim, pair)]
    anywhere += [lambda x: torch.cat(torch.chunk(x, parts, dim)[::-1], dim), lambda x: torch.stack([x, x], dim=dim)]
    return draw(st.sampled_from(anywhere))


def joined(draw: st.DrawFn, pool: list[Pair]) -> Pair | None:
    """Two earlier results side by side, where torch joins them."""
    (one, other) = draw(st.sampled_from(pool)), draw(st.sampled_from(pool))
    join = draw(st.sampled_from([torch.cat, torch.stack, torch.concat]))
    dim = draw(st.integers(0, max(one[1].ndim - 1, 0)))
    try:
        truth = join([one[1], other[1]], dim=dim)
    except (RuntimeError, IndexError):
        return None
    return join([one[0], other[0]], dim=dim), truth


def chain(draw: st.DrawFn) -> tuple[list[Recorder], Pair]:
    """Up to six operations on one or two stored tensors, and what torch says of the same."""
    recorded = draw(st.lists(recorders(), min_size=1, max_size=2))
    pool: list[Pair] = [(recorder.lazy(f"w{at}"), recorder.whole) for at, recorder in enumerate(recorded)]
    for _ in range(draw(st.integers(1, 6))):
        lazy, truth = pool[-1]
        if draw(st.integers(0, 3)) == 0:
            pair = joined(draw, pool)
        else:
            operation = draw(operations(truth.shape))
            expected = operation(truth)
            try:
                pair = operation(lazy), expected
            except UnsupportedValue:
                pair = None  # a reshape that has to copy; what is one is a law of its own
        if pair and pair[1].numel() < 5000:
            pool.append(pair)
    return recorded, pool[-1]


def check_reads_what_torch_computes(read: Callable[[LazyTensor], torch.Tensor], pair: Pair) -> None:
    lazy, truth = pair
    assert (lazy.shape, lazy.dtype, lazy.ndim, lazy.numel()) == (truth.shape, truth.dtype, truth.ndim, truth.numel())
    assert (lazy.nbytes, lazy.itemsize) == (truth.nbytes, truth.itemsize)
    elements = read(lazy)
    assert bits(elements) == bits(truth)
    assert elements.stride() == torch.empty(truth.shape).stride()


@given(st.data())
def test_chain_reads_what_torch_computes(data: st.DataObject) -> None:
    recorded, (lazy, truth) = chain(data.draw)
    assert not any(recorder.boxes for recorder in recorded)
    check_reads_what_torch_computes(LazyTensor.read, (lazy, truth))
    read = sorted(shape for recorder in recorded for _, shape in recorder.boxes)
    assert read == sorted(fetch.shape for fetch in lazy.fetches)


def test_read_that_skips_a_cast_is_caught() -> None:
    recorder = Recorder(torch.tensor([1.001, 2.0]))
    pair = recorder.lazy().bfloat16().float(), recorder.whole.bfloat16().float()
    check_reads_what_torch_computes(LazyTensor.read, pair)
    with pytest.raises(AssertionError):
        check_reads_what_torch_computes(lambda lazy: replace(lazy, casts=lazy.casts[-1:]).read(), pair)


def recorded(operation: Operation, lazy: LazyTensor) -> bool:
    try:
        operation(lazy)
    except UnsupportedValue:
        return False
    return True


def check_recorded_iff_torch_makes_a_view(records: Callable[[Operation, LazyTensor], bool], pair: Pair) -> None:
    lazy, truth = pair
    for operation in (torch.ravel, lambda x: x.reshape(-1, *x.shape[2:]), lambda x: x.reshape(*x.shape[:-2], -1)):
        view = operation(truth).untyped_storage().data_ptr() == truth.untyped_storage().data_ptr()
        assert records(operation, lazy) == view


@given(recorders(), st.data())
def test_reshape_is_recorded_where_torch_makes_a_view(recorder: Recorder, data: st.DataObject) -> None:
    index, order = data.draw(indices(recorder.whole.shape)), st.permutations
    truth, lazy = recorder.whole[index], recorder.lazy()[index]
    assume(truth.ndim > 1 and truth.numel())
    dims = data.draw(order(range(truth.ndim)))
    check_recorded_iff_torch_makes_a_view(recorded, (lazy.permute(dims), truth.permute(dims)))


def test_refusing_every_reshape_is_caught() -> None:
    recorder = Recorder(torch.ones(2, 3))
    with pytest.raises(AssertionError):
        check_recorded_iff_torch_makes_a_view(lambda operation, lazy: False, (recorder.lazy(), recorder.whole))


@given(recorders(), st.integers(0, 20), st.integers(0, 9), st.integers(1, 7))
def test_a_slice_may_run_over_the_end_of_a_merged_dimension(recorder: Recorder, start: int, long: int, by: int) -> None:
    lazy, truth = (one.flatten()[start : start + long : by] for one in (recorder.lazy(), recorder.whole))
    check_reads_what_torch_computes(LazyTensor.read, (lazy, truth))


def check_fetches_the_smallest_box(recorder: Recorder, index: tuple[Any, ...], lazy: LazyTensor) -> None:
    lazy.read()
    places = np.argwhere(np.isin(recorder.whole, recorder.whole[index]))
    boxes = [(low := places.min(0), places.max(0) + 1 - low)] if len(places) else []
    assert recorder.boxes == [(tuple(low.tolist()), tuple(shape.tolist())) for low, shape in boxes]
    assert lazy.nbytes_to_read == sum(prod(shape) for _, shape in boxes) * recorder.whole.itemsize


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4), st.integers(1, 3), st.integers(0, 2)), max_size=4))
def test_slices_fetch_the_smallest_box(slices: list[tuple[int, int, int, int]]) -> None:
    shape = [start + long + rest for start, long, _, rest in slices]
    recorder = Recorder(torch.arange(prod(shape)).reshape(shape))
    index = tuple(slice(start, start + long, by) for start, long, by, _ in slices)
    check_fetches_the_smallest_box(recorder, index, recorder.lazy()[index])


def test_fetching_more_than_the_slice_is_caught() -> None:
    recorder = Recorder(torch.arange(24).reshape(4, 6))
    with pytest.raises(AssertionError):
        check_fetches_the_smallest_box(recorder, (slice(1, 3),), recorder.lazy())


def check_each_is_what_it_is_alone(rows: list[tuple[Recorder, str]]) -> None:
    wholes = [recorder.whole for recorder, _ in rows]
    readers, names = [recorder.read_box for recorder, _ in rows], [name for _, name in rows]
    together = stored_each(readers, [tuple(whole.shape) for whole in wholes], [whole.dtype for whole in wholes], names)
    for lazy, (recorder, name) in zip(together, rows, strict=True):
        assert repr(lazy) == repr(recorder.lazy(name))
        check_reads_what_torch_computes(LazyTensor.read, (lazy, recorder.whole))


@given(st.lists(st.tuples(recorders(), st.text()), max_size=6))
def test_each_of_many_is_what_it_is_alone(rows: list[tuple[Recorder, str]]) -> None:
    check_each_is_what_it_is_alone(rows)


def test_the_law_of_many_catches_a_place_of_another_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_make, "dense", lambda shape: dense(tuple(reversed(shape))))
    with pytest.raises(AssertionError):
        check_each_is_what_it_is_alone([(Recorder(torch.ones(2, 3)), "w")])


# Plain cases.


@pytest.fixture
def recorder() -> Recorder:
    return Recorder(torch.arange(24, dtype=torch.float32).reshape(4, 6))


def test_cat_reads_only_the_parts_that_it_needs() -> None:
    recorders = [Recorder(torch.full((2, 3), float(n))) for n in range(4)]
    whole = torch.cat([recorder.lazy(f"w{n}") for n, recorder in enumerate(recorders)])
    assert whole[3:5, 1:].read().tolist() == [[1.0, 1.0], [2.0, 2.0]]
    assert [recorder.boxes for recorder in recorders] == [[], [((1, 1), (1, 2))], [((0, 1), (1, 2))], []]


def test_cat_of_chunks_reads_the_tensor_in_pieces(recorder: Recorder) -> None:
    lazy = torch.cat(torch.chunk(recorder.lazy(), 2, dim=0), dim=0)
    assert bits(lazy.read()) == bits(recorder.whole)
    assert [fetch.offset for fetch in lazy.fetches] == [(0, 0), (2, 0)]
    assert lazy.nbytes_to_read == lazy.nbytes == 96


def test_cat_promotes_as_torch_does() -> None:
    parts = [torch.tensor([1, 300]), torch.tensor([0.1], dtype=torch.bfloat16), torch.tensor([])]
    lazy = torch.cat([Recorder(part).lazy() for part in parts])
    assert bits(lazy.read()) == bits(torch.cat(parts))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint16, torch.float8_e4m3fn])
def test_any_dtype_reads_back(dtype: torch.dtype) -> None:
    truth = torch.arange(24, dtype=torch.float32).reshape(4, 6).to(dtype)
    halves = Recorder(truth).lazy().chunk(2, 1)
    assert bits(torch.cat(halves[::-1], 1).read()) == bits(torch.cat(truth.chunk(2, 1)[::-1], 1))


def test_read_owns_what_it_gives(recorder: Recorder) -> None:
    lazy = recorder.lazy()
    lazy.read().zero_()
    assert bits(lazy.read()) == bits(recorder.whole)
    corner = lazy.flatten()[7:9].read()
    assert corner.untyped_storage().nbytes() == 8


def test_reader_may_give_a_strided_tensor_with_an_offset() -> None:
    big = torch.arange(60).reshape(6, 10)
    lazy = stored(lambda at, n: big.t()[at[0] + 1 :, at[1] + 1 :][: n[0], : n[1]], (9, 5), torch.int64, name="w")
    assert lazy.t()[1:3, ::2].read().tolist() == big[2:4, 1::2].tolist()


def test_reader_that_gives_another_box_is_an_error() -> None:
    lazy = stored(lambda offset, shape: torch.zeros(1), (4,), torch.float32, name="w")
    with pytest.raises(ShapeError, match=r"(?s)'w'.*found \(1,\) float32, expected \(4,\) float32"):
        lazy.read()


def test_empty_and_scalar_tensors() -> None:
    empty, scalar = Recorder(torch.empty(0, 5)), Recorder(torch.tensor(3.0))
    assert empty.lazy().t().read().shape == (5, 0)
    assert empty.boxes == []
    assert scalar.lazy().reshape(1, 1).expand(2, 3).read().tolist() == [[3.0] * 3] * 2
    assert scalar.boxes == [((), ())]
    assert torch.stack([scalar.lazy(), scalar.lazy()]).read().tolist() == [3.0, 3.0]


def test_what_a_tensor_says_of_itself(recorder: Recorder) -> None:
    lazy = recorder.lazy("decoder.weight").bfloat16()
    assert repr(lazy) == "LazyTensor('decoder.weight', (4, 6), torch.bfloat16)"
    assert repr(torch.cat([lazy] * 4)) == (
        "LazyTensor('cat(decoder.weight, decoder.weight, and 2 more)', (16, 6), torch.bfloat16)"
    )
    assert (lazy.device.type, lazy.layout, lazy.requires_grad) == ("cpu", torch.strided, False)
    assert (len(lazy), lazy.size(), lazy.size(-1), lazy.dim()) == (4, (4, 6), 6, 2)
    assert (torch.numel(lazy), lazy.element_size(), lazy.is_floating_point()) == (24, 2, True)
    assert (lazy.T.shape, lazy[None].mT.shape) == ((6, 4), (1, 6, 4))
    assert [row.shape for row in lazy] == [(6,)] * 4
    assert recorder.boxes == []


def test_what_changes_nothing_is_the_same_tensor(recorder: Recorder) -> None:
    lazy = recorder.lazy()
    same = [lazy.contiguous(), lazy.clone(), lazy.detach(), lazy.cpu(), lazy.float(), lazy.to("cpu", torch.float32)]
    same += [
        lazy.to(torch.device("cpu"), copy=True),
        lazy.to(None),
        copy.copy(lazy),
        copy.deepcopy({"w": [lazy]})["w"][0],
    ]
    assert all(each is lazy for each in same)


def test_equality_is_identity(recorder: Recorder) -> None:
    one, other = recorder.lazy(), recorder.lazy()
    assert one == one
    assert one != other
    assert len({one, other, one}) == 2


def test_torch_says_what_is_wrong_with_arguments(recorder: Recorder) -> None:
    lazy = recorder.lazy()
    for wrong in (lambda: lazy[4], lambda: lazy.narrow(0, 3, 2), lambda: lazy.view(5, 5), lambda: torch.cat([lazy], 2)):
        with pytest.raises((IndexError, RuntimeError)):
            wrong()
    with pytest.raises(TypeError, match="0-d"):
        list(lazy[0, 0])


def test_negative_length_is_an_error() -> None:
    with pytest.raises(MetadataError, match="'w'"):
        stored(torch.zeros, (2, -1), torch.float32, name="w")


REFUSED: dict[str, Callable[[Any], object]] = {
    "__pow__": lambda x: x**2,
    "mul": lambda x: torch.ones(4, 6) * x,
    "__eq__": lambda x: x == torch.ones(4, 6),
    "__rfloordiv__": lambda x: torch.ones(4, 6) // x,
    "equal": lambda x: torch.equal(x, x),
    "__bool__": bool,
    "__float__": lambda x: float(x[0, 0]),
    "__array__": lambda x: __import__("numpy").asarray(x),
    "__contains__": lambda x: 1.0 in x,
    "__setitem__": lambda x: x.__setitem__(0, 1.0),
    "pickling": pickle.dumps,
    "item": lambda x: x.item(),
    "data_ptr": lambda x: x.data_ptr(),
    "stride": lambda x: x.stride(),
    "zero_": lambda x: x.zero_(),
    "copy_": lambda x: torch.ones(4, 6).copy_(x),
    "as_strided": lambda x: x.as_strided((2,), (3,)),
    "view of": lambda x: x.view(torch.int32),
    "reshape of": lambda x: x.t().reshape(24),
    "indexing with Tensor": lambda x: x[torch.tensor([0])],
    "indexing with list": lambda x: x[[0, 1]],
    "indexing with bool": lambda x: x[True],
    "__getitem__": lambda x: torch.ones(4)[x],
    "cat with a tensor that is not lazy": lambda x: torch.cat([x, torch.ones(4, 6)]),
    "stack with a tensor": lambda x: torch.stack([x, x], out=torch.ones(2, 4, 6)),
    "cuda": lambda x: x.cuda(),
    r"to\(cuda:0\)": lambda x: x.to("cuda:0"),
    r"to\(Tensor\)|to is not": lambda x: x.to(torch.ones(1)),
    r"to\(memory_format=": lambda x: x.to(torch.int8, memory_format=torch.channels_last),
    "contiguous": lambda x: x.contiguous(memory_format=torch.channels_last),
    "type": lambda x: x.type("torch.IntTensor"),
}


@pytest.mark.parametrize("operation", REFUSED)
def test_operation_that_needs_elements_is_refused(operation: str, recorder: Recorder) -> None:
    with pytest.raises(UnsupportedValue, match=rf"(?s)({operation}).*read\(\)"):
        REFUSED[operation](recorder.lazy())
    assert recorder.boxes == []


@pytest.mark.parametrize("name", ["data", "real", "grad", "nonsense", "__cuda_array_interface__"])
def test_attribute_that_needs_elements_is_absent(name: str, recorder: Recorder) -> None:
    assert not hasattr(recorder.lazy(), name)
