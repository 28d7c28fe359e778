"""Tensors that aren't row-major in files of torch.save: channels_last, transposed, expanded, conjugated.

A run that is over can't save them again.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch.distributed.tensor import Shard

import shardtree as st
from shardtree.errors import CorruptCheckpoint, UnsupportedValue
from shardtree.formats import archives
from shardtree.formats.archives import _fill
from shardtree.formats.pickles import Global, Persistent, Reduced, write_pickle
from shardtree.formats.rank_archives import _scattered
from shardtree.formats.torch_dist import _load
from shardtree.storage import MemoryStorage
from shardtree.strategies import Damage, LoadOptions
from shardtree.testing import Layout, bits, cut, even_layout, layouts
from tests.formats.test_dtensor_files import folder_of, folder_of_case, with_pickle
from tests.formats.test_torch_checkpointing import boxes, described, of_boxes
from tests.formats.test_torch_dist_read import Writer
from tests.formats.zero_folders import Save, universal_of
from tests.formats.zero_folders import folder_of as zero_folder
from tests.interop.dtensor_cases import Case
from tests.shell.table import folders
from tests.shell.table.folders import archive

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

COMPLEX = torch.randn(4, 6, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
ROWS = torch.arange(12.0).view(3, 4)
KINDS: dict[str, torch.Tensor] = {
    "channels_last": torch.arange(120.0).view(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "transposed": ROWS.t(),
    "expanded": torch.arange(4.0).expand(3, 4),
    "a number expanded": torch.tensor(3.0).expand(5),
    "overlapping": torch.arange(20.0).as_strided((4, 3), (2, 1)),
    "overlapping more than there are": torch.arange(10.0).as_strided((6, 5), (1, 1)),
    "every second": torch.arange(20.0)[::2],
    "columns of more": torch.arange(100.0).view(10, 10)[:, 3:5],
    "conjugated": COMPLEX.conj(),
    "conjugated and transposed": COMPLEX.conj().t(),
    "conjugated, of 16 bytes": COMPLEX.to(torch.complex128).conj(),
    "conjugated, of 4 bytes": torch.arange(6, dtype=torch.int32).view(2, 3).view(torch.complex32).conj(),
    "negated": COMPLEX.clone().conj().imag,
    "a negated number": torch.tensor(1 + 2j).conj().imag,
    "bools": (ROWS % 2 == 0).t(),
    "float8": ROWS.to(torch.float8_e4m3fn).t(),
    "NaN and -0.0": torch.tensor([[float("nan"), 1.0], [2.0, -0.0]]).bfloat16().t(),
    "no rows": torch.zeros(0, 3).t(),
}


def as_saved(tensor: torch.Tensor) -> tuple[Any, ...]:
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return plain.dtype, tuple(plain.shape), bits(plain)


def as_found(folder: Any, **options: Any) -> dict[str, tuple[Any, ...]]:
    found = st.load_plain_tensors(folder, options=LoadOptions(**options))
    return {key: as_saved(tensor) for key, tensor in found.items()}


@pytest.mark.parametrize("verify", ["whole", "all", None])
def test_files_of_ranks_load_whatever_their_tensors_strides_are(verify: Any) -> None:
    folder = folder_of([KINDS])
    assert as_found(folder, verify=verify) == {key: as_saved(tensor) for key, tensor in KINDS.items()}
    assert not [finding for finding in st.verify(folder) if isinstance(finding, Damage)]


def test_files_of_ranks_are_converted_in_bounded_pieces() -> None:
    folder, there = folder_of([KINDS]), MemoryStorage()
    st.convert(folder, there, backend="safetensors", max_bytes_in_flight=64)
    assert as_found(there) == {key: as_saved(tensor) for key, tensor in KINDS.items()}


# Any strides, read in any layout: flat ranges too


@some.composite
def views(draw: some.DrawFn) -> torch.Tensor:
    """Draw a view of a small storage, by strides in any order, by some of 0, and by some that overlap."""
    shape = tuple(draw(some.lists(some.integers(1, 5), max_size=3)))
    if draw(some.booleans()):
        stride = tuple(draw(some.integers(0, 7)) for _ in shape)
        offset = draw(some.integers(0, 9))
        return torch.arange(150, dtype=torch.int16).as_strided(shape, stride, offset)
    order = draw(some.permutations(range(len(shape))))
    whole = torch.randn(shape, dtype=torch.complex64, generator=torch.Generator().manual_seed(1))
    turned = whole.permute(*order) if shape else whole
    return turned.conj() if draw(some.booleans()) else turned


def check_parts(tensor: torch.Tensor, lie: Layout) -> None:
    """Raise unless every rank of a layout gets its own parts of a tensor that a file of torch.save has."""
    folder, plain = folder_of([{"w": tensor}]), tensor.resolve_conj().contiguous()
    for rank in range(lie.ranks):
        own = cut(lie, "w", plain, rank)
        found = st.load([part.without_data() for part in own], folder, validate_access_integrity=False)
        assert [bits(part) for part in found] == [bits(part.data) for part in own]


def views_and_layouts() -> some.SearchStrategy[tuple[torch.Tensor, Layout]]:
    return views().flatmap(lambda view: some.tuples(some.just(view), layouts(tuple(view.shape), 2)))


@settings(max_examples=30, deadline=None)
@given(views_and_layouts())
def test_whatever_its_strides_a_tensor_loads_in_any_layout(case: tuple[torch.Tensor, Layout]) -> None:
    check_parts(*case)


@pytest.mark.parametrize("strip", [16, 64])
def test_strips_of_few_bytes_are_put_together(strip: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fill, "_SHORT_BYTES", strip)
    monkeypatch.setattr(_fill, "_STRIP_BYTES", strip)
    assert as_found(folder_of([KINDS])) == {key: as_saved(tensor) for key, tensor in KINDS.items()}


def test_the_law_of_strides_catches_axes_in_the_order_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    real = archives.box_of

    def by_memory(tensor: archives.StoredTensor, box: archives.Box) -> archives.StoredTensor:
        return real(replace(tensor, stride=tuple(sorted(tensor.stride, reverse=True))), box)

    monkeypatch.setattr(_scattered, "box_of", by_memory)
    with pytest.raises(AssertionError):
        check_parts(ROWS.t(), even_layout((4, 3), 2, axis=0))


# Every format of such files


def test_parts_of_dtensors_may_each_have_other_strides() -> None:
    rows = Case(torch.arange(24.0).view(6, 4), torch.arange(2), ("fsdp",), (Shard(0),))
    assert torch.equal(st.load_plain_tensors(folder_of_case(rows))["w"], rows.whole)
    by_column = Case(rows.whole.t().contiguous().t(), torch.arange(2), ("fsdp",), (Shard(0),))
    folder = folder_of([{"w": case.dtensors()[rank]} for rank, case in enumerate((rows, by_column))])
    assert torch.equal(st.load_plain_tensors(folder)["w"], rows.whole)


def test_weights_and_states_of_deepspeed_load_whatever_their_strides_are() -> None:
    save = Save([{"a": (5, 3), "b": (4,)}])
    folder = zero_folder(save)
    name = "step_3/mp_rank_00_model_states.pt"
    model = torch.load(io.BytesIO(folder.read(name)), weights_only=False)
    model["module"]["a"] = model["module"]["a"].t().contiguous().t()
    model["module"]["frozen"] = KINDS["channels_last"]
    folder.replace(name, archive(model), durable=False)
    found = as_found(folder)
    assert found["a"] == as_saved(save.expected()["a"]) and found["frozen"] == as_saved(KINDS["channels_last"])

    universal = universal_of(save)
    master, flat = save.expected()["optimizer.state.param.a"], save.expected()["optimizer.state.exp_avg.a"].flatten()
    universal.replace("zero/a/fp32.pt", archive({"param": master.t().contiguous().t()}), durable=False)
    every_second = torch.stack([flat, flat]).t().contiguous()[:, 0]
    universal.replace("zero/a/exp_avg.pt", archive({"param": every_second}), durable=False)
    found = as_found(universal)
    assert {key: found[key] for key in save.expected()} == {key: as_saved(one) for key, one in save.expected().items()}


def test_boxes_of_columns_and_of_transposed_tensors_of_torch_checkpointing_load() -> None:
    whole = torch.arange(8.0).reshape(4, 2)
    left, right = boxes(([0, 0], [0, 1], [4, 1])), boxes(([0, 1], [0, 0], [4, 1]))
    values = {"model_0.pt": {"w": whole.flip(1).t().contiguous().t()}, "model_1.pt": {"w": whole[:, 1:]}}
    files = {name: archive(value) for name, value in values.items()}
    metadata = pickle.dumps(described(of_boxes(left, right), 2))
    assert torch.equal(st.load_plain_tensors(folders.folder_of(files | {"metadata.pkl": metadata}))["model.w"], whole)


def torch_dist_folder(tensors: dict[str, torch.Tensor]) -> MemoryStorage:
    writer = Writer()
    for key, tensor in tensors.items():
        writer.add(key, tuple(tensor.shape), (0,) * tensor.ndim, tensor)
    return folders.folder_of(writer.files())


def test_rows_of_an_archive_of_torch_dist_are_read_without_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []

    def filled(read: Any, tensor: archives.StoredTensor, what: str) -> torch.Tensor:
        shapes.append(tensor.shape)
        return archives.filled_tensor(read, tensor, what)

    monkeypatch.setattr(_load, "filled_tensor", filled)
    tensors = {key: tensor for key, tensor in KINDS.items() if tensor.ndim > 1 and tensor.numel()}
    folder = torch_dist_folder(tensors)
    assert as_found(folder) == {key: as_saved(tensor) for key, tensor in tensors.items()}
    whole, _ = [*shapes], shapes.clear()
    for key, tensor in tensors.items():
        plain = tensor.resolve_conj().resolve_neg().contiguous()
        own = cut(even_layout(tuple(plain.shape), plain.shape[0], axis=0), key, plain, 1)
        found = st.load([part.without_data() for part in own], folder, validate_access_integrity=False)
        assert [bits(part) for part in found] == [bits(part.data) for part in own]
    assert len(whole) == len(shapes) > 5 and {shape[0] for shape in shapes} == {1}


# Copies, checksums, costs


def test_copies_in_other_orders_are_compared_bit_for_bit() -> None:
    nan = torch.tensor([[float("nan"), 1.0, 2.0], [-0.0, 3.0, 4.0]])
    same, negative = nan.t().contiguous().t(), nan.clone()
    assert as_found(folder_of([{"w": nan}, {"w": same}])) == {"w": as_saved(nan)}
    negative[1, 0] = 0.0
    for pair in ([nan, negative.t().contiguous().t()], [same, negative.t().contiguous().t()], [same, negative]):
        with pytest.raises(UnsupportedValue, match="different copies"):
            st.load_plain_tensors(folder_of([{"w": tensor} for tensor in pair]))


def test_a_flipped_bit_of_a_scattered_tensor_is_found_and_named() -> None:
    data = archive(OrderedDict(w=KINDS["channels_last"]))
    name = "model_world_size_1_rank_0.pt"
    begin = data.index(KINDS["channels_last"].permute(0, 2, 3, 1).contiguous().numpy().tobytes())
    folder = folders.folder_of(folders.flipped({name: data}, name, 8 * begin + 3))
    with pytest.raises(CorruptCheckpoint, match="a tensor's checksum differs"):
        st.load_plain_tensors(folder)
    assert [finding.keys for finding in st.verify(folder) if isinstance(finding, Damage)] == [("w",)]
    top = st.ShardedTensor.from_rank_offsets("w", torch.zeros(1, 3, 4, 5), (0, 0, 2))
    everything = LoadOptions(verify="all")
    with pytest.raises(CorruptCheckpoint, match="checksum differs"):
        st.load([top], folder, validate_access_integrity=False, options=everything)


def test_a_cost_counts_the_bytes_that_a_box_spans() -> None:
    folder = folder_of([{"w": ROWS.t()}])
    half = st.ShardedTensor.from_rank_offsets("w", torch.zeros(4, 1), (1, 0, 3))
    report = st.explain([half], folder, validate_access_integrity=False)
    assert "16 B" in str(report), report


# Strides that nothing wrote


def tensor_of(shape: tuple[int, ...], stride: tuple[int, ...], *extra: Any, kind: str = "FloatStorage") -> Reduced:
    """Return the pickle of a tensor in a storage of 12 floats or 6 integers."""
    storage = Persistent(("storage", Global("torch", kind), "0", "cpu", 12 if kind == "FloatStorage" else 6))
    hooks = Reduced(Global("collections", "OrderedDict"), ())
    return Reduced(Global("torch._utils", "_rebuild_tensor_v2"), (storage, 0, shape, stride, False, hooks, *extra))


def crafted(*tensors: Any) -> MemoryStorage:
    """Return a rank's file whose pickle has tensors of a storage of 12 floats, described by hand."""
    named = {f"w{number}": tensor for number, tensor in enumerate(tensors)}
    return with_pickle(archive([ROWS]), lambda _: write_pickle(named, protocol=2))


@pytest.mark.parametrize(
    ("shape", "stride"),
    [
        ((3, 4), (4, 2)),
        ((3, 4), (-4, 1)),
        ((3, 4), (2**62, 1)),
        ((2, 2**62), (0, 0)),
        ((2**40,), (0,)),
        ((2**15, 2**15), (0, 0)),
        ((3, 3), (1,)),
    ],
)
def test_strides_beyond_a_storage_are_refused_and_named(shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    folder = crafted(tensor_of(shape, stride))
    for call in (st.load_plain_tensors, st.open_checkpoint):
        with pytest.raises(
            CorruptCheckpoint, match=r"(?s)model_world_size_1_rank_0.pt'.*(a tensor of|much larger than its storage)"
        ):
            call(folder)


def test_what_expands_to_more_than_files_have_is_refused_by_name_and_the_rest_loads() -> None:
    crowd = [tensor_of((2**20, 3), (0, 1)) for _ in range(50)]
    folder = crafted(tensor_of((4, 3), (1, 4)), *crowd)
    with pytest.raises(UnsupportedValue, match=r"12582912 bytes, expanded from 12 that are stored") as caught:
        st.load_plain_tensors(folder)
    assert "'w0'" not in str(caught.value) and "and 38 more" in str(caught.value)
    few = st.load_tensors_metadata(folder)
    target = {key: few[key] for key in ("w0", "w1", "w2")}
    assert {key: tuple(tensor.shape) for key, tensor in st.load(target, folder).items()}["w2"] == (2**20, 3)


@pytest.mark.parametrize("extra", [{"neg": True}, {"conj": True}, {"neg": 1}, {"other": True}, [1]])
def test_bits_that_no_tensor_of_the_dtype_has_are_refused(extra: Any) -> None:
    folder = crafted(tensor_of((6,), (1,), extra, kind="LongStorage"))
    with pytest.raises(CorruptCheckpoint, match=r"model_world_size_1_rank_0\.pt"):
        st.load_plain_tensors(folder)
