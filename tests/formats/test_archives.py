"""torch.save's archives: read and written as torch does, and hostile ones refused."""

from __future__ import annotations

import io
import pickletools
import re
import signal
import struct
import sys
import time
import warnings
import zipfile
import zlib
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, IntFlag
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardtree.core.codec import decode_tree, encode_tree, row_major_bits
from shardtree.errors import CheckpointingException, CorruptCheckpoint, TreeError, UnsafeFile, UnsupportedValue
from shardtree.formats.archives import (
    add_record,
    archive_head,
    archive_length,
    archive_tail,
    decode_archive,
    encode_archive,
    find_record,
    tensor_place,
)
from shardtree.formats.pickles import Global, Persistent, Reduced, write_pickle
from shardtree.testing import STORABLE_DTYPES, common_states, outline, tensors
from shardtree.trees import HOLE, Record

pytestmark = [
    pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support is experimental:UserWarning"),
]

SAVED_DTYPES = [dtype for dtype in STORABLE_DTYPES if not re.fullmatch(r"torch.u?int[1-7]", str(dtype))]

FIXTURES = Path(__file__).parents[1] / "fixtures"


def saved(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def decode(data: bytes, **options: Any) -> Any:
    return decode_archive(data, what="a test", **options)


def place_of(data: bytes) -> Any:
    return tensor_place(lambda begin, end: data[begin:end], len(data), what="a test")


def payload(tensor: torch.Tensor) -> bytes:
    return row_major_bits(tensor).numpy().tobytes()


def check_same_tensor(found: torch.Tensor, tensor: torch.Tensor) -> None:
    assert (found.dtype, found.shape, found.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert payload(found) == payload(tensor)


# ------------------------------------------------------------------------------------------------- values


class Color(Enum):
    RED = 1


class Bits(IntFlag):
    A = 1
    B = 2


@dataclass
class Config:
    lr: float
    extra: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Slotted:
    lr: float
    name: str = "x"


@dataclass(slots=True)
class Open:
    lr: float


Moment = namedtuple("Moment", "mean step")

VALUES: dict[str, Any] = {
    "none": None,
    "numbers": [True, False, 0, -5, 2**70, -(2**3000), 1.5, -0.0, 1 + 2j],
    "text": ["", "é", "\ud800", b"", b"abc\xff", bytearray(b"x"), bytearray()],
    "containers": [[], [1, [2]], (), (1,), (1, (2,)), (1, 2, 3, 4), {}, {1: 2, (1, "a"): 3, None: 4}],
    "sets": [set(), {1, 2}, frozenset(), frozenset([(1, 2)])],
    "dicts": [OrderedDict(a=1), defaultdict(list, {1: [2]}), defaultdict(None), Counter("abca")],
    "deques": [deque([1, 2], 5), deque([1]), deque()],
    "ranges": [range(1, 10, 2), slice(1, None, 2), slice(None)],
    "torch": [torch.Size([1, 2]), torch.Size([]), torch.bfloat16, torch.device("cuda:1"), torch.device("cpu")],
    "paths": [Path("/a/b"), Path(), PurePosixPath("/x"), PureWindowsPath("c:\\x")],
    "spaces": [Namespace(a=1, b=[2]), SimpleNamespace(q=1), Namespace()],
    "numpy scalars": [np.float32(2), np.int64(-1), np.bool_(True), np.str_("abc"), np.str_(""), np.bytes_(b"x\0")],
    "more scalars": [np.datetime64("2020-01-01T00:00:01", "ns"), np.timedelta64(5, "D"), np.longdouble(1)],
}

ARRAYS = [
    np.arange(6).reshape(2, 3),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.array(["ab", "c"]),
    np.array([b"ab"]),
    np.array(["2020-01-01"], dtype="M8[D]"),
    np.array(5, np.uint8),
    np.arange(4, dtype=np.complex64),
    np.arange(10)[::2],
]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("name", VALUES)
def test_plain_values_come_back(name: str, protocol: int) -> None:
    found = decode(saved(VALUES[name], pickle_protocol=protocol))
    assert repr(found) == repr(VALUES[name])
    assert found == VALUES[name]


@pytest.mark.parametrize("name", VALUES)
def test_plain_values_are_written_as_torch_reads_them(name: str) -> None:
    data = encode_archive(VALUES[name])
    assert repr(decode(data)) == repr(VALUES[name])
    if "scalars" not in name:  # NumPy's own reader drops what text ends with
        assert torch.load(io.BytesIO(data), weights_only=False) == VALUES[name]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("array", ARRAYS, ids=str)
def test_arrays_come_back(array: np.ndarray[Any, Any], protocol: int) -> None:
    for data in (saved(array, pickle_protocol=protocol), encode_archive([array])):
        found = decode(data)
        found = found[0] if isinstance(found, list) else found
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        assert found.flags.writeable
        assert (found == array).all()


def test_arrays_of_another_byte_order_come_back_by_value() -> None:
    found = decode(saved(np.arange(3, dtype=">i4")))
    assert found.tolist() == [0, 1, 2]


def test_buffers_come_back() -> None:
    buffer = io.BytesIO(b"hello")
    buffer.seek(2)
    for data in (saved(buffer), encode_archive(buffer)):
        found = decode(data)
        assert (found.getvalue(), found.tell()) == (b"hello", 2)


@given(common_states())
def test_common_states_come_back(state: Any) -> None:
    data = encode_archive(state)
    assert outline(decode(data)) == outline(state)
    assert outline(torch.load(io.BytesIO(data), weights_only=False)) == outline(state)
    assert outline(decode(saved(state))) == outline(state)


def check_common_state(encode: Callable[[Any], bytes], state: Any) -> None:
    """The law of values, for the planted fault."""
    assert outline(decode(encode(state))) == outline(state)


def test_the_law_of_values_catches_tuples_that_become_lists() -> None:
    def broken(state: Any) -> bytes:
        return encode_archive({key: list(item) if type(item) is tuple else item for key, item in state.items()})

    check_common_state(encode_archive, {"betas": (0.9, 0.95)})
    with pytest.raises(AssertionError):
        check_common_state(broken, {"betas": (0.9, 0.95)})


def test_classes_that_the_caller_names_come_back() -> None:
    value = [Color.RED, Bits.A | Bits.B, Config(0.1, [1]), Slotted(0.2), Open(0.3), Moment(1, torch.ones(2))]
    types = (Color, Bits, Config, Slotted, Open, Moment)
    for data in (encode_archive(value), saved(value), saved(value, pickle_protocol=4)):
        found = decode(data, types=types)
        assert found[:5] == value[:5]
        assert type(found[5]) is Moment
        with pytest.raises(UnsafeFile, match="types="):
            decode(data)


def test_a_class_that_has_other_fields_now_is_refused() -> None:
    data = encode_archive([Config(0.1)])
    changed = dataclass(type("Config", (), {"__annotations__": {"rate": float}, "__module__": __name__}))
    with pytest.raises(UnsupportedValue, match="Config"):
        decode(data, types=(changed,))


def test_attributes_that_are_no_fields_are_left_out() -> None:
    value = Config(0.1)
    value.hidden = 5  # type: ignore[attr-defined]
    assert vars(decode(saved(value), types=(Config,))) == {"lr": 0.1, "extra": []}


class Foreign:
    pass


@pytest.mark.parametrize(
    "value",
    [
        HOLE,
        Record("a.B", {}),
        Foreign(),
        len,
        Foreign,
        np.array([None]),
        np.zeros(2, [("a", "i4")]),
        defaultdict(Foreign),
        torch.zeros(2).to_sparse(),
        torch.empty(2, device="meta"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_reading_would_take_code_for_is_not_written(value: Any) -> None:
    with pytest.raises(UnsupportedValue, match=r"tree\['a'\]\[1\]"):
        encode_archive({"a": [0, value]})


def test_allow_pickle_writes_and_reads_it() -> None:
    data = encode_archive({"a": Foreign()}, allow_pickle=True)
    with pytest.raises(UnsafeFile, match=r"test_archives\.Foreign"):
        decode(data)
    assert type(decode(data, allow_pickle=True)["a"]) is Foreign


def test_cycles_and_depths_are_refused() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(TreeError):
        encode_archive(cycle)
    deep: Any = []
    for _ in range(99):
        deep = [deep]
    assert decode(encode_archive(deep)) == deep
    with pytest.raises(TreeError):
        encode_archive([[deep]])


@pytest.mark.parametrize(
    "path", sorted(FIXTURES.glob("megatron*/**/*.pt")), ids=lambda path: str(path.relative_to(FIXTURES))
)
def test_files_of_megatron_are_read(path: Path) -> None:
    data = path.read_bytes()
    ours, theirs = decode(data), torch.load(io.BytesIO(data), weights_only=False)
    # An enum of Megatron-Core's is a record for those who don't run it.
    if hasattr(theirs.get("args"), "attention_backend"):
        record, member = (vars(state["args"]).pop("attention_backend") for state in (ours, theirs))
        assert record.fields["value"] == member.value
    assert outline(ours) == outline(theirs)


# ------------------------------------------------------------------------------------------------- tensors


@given(tensors())
def test_torch_and_we_write_the_same_tensors(tensor: torch.Tensor) -> None:
    data = archive_head(tensor.dtype, tensor.shape) + payload(tensor)
    data += archive_tail(tensor.dtype, tensor.shape, zlib.crc32(payload(tensor)))
    assert len(data) == archive_length(tensor.dtype, tensor.shape)
    for load in (decode, lambda data: torch.load(io.BytesIO(data), weights_only=True)):
        check_same_tensor(load(data), tensor.contiguous())
    assert zipfile.ZipFile(io.BytesIO(data)).testzip() is None
    place = place_of(data)
    assert place.begin % 64 == 0
    assert place.fills_record
    assert (place.dtype, place.shape) == (tensor.dtype, tuple(tensor.shape))
    assert data[place.begin : place.begin + place.record.nbytes] == payload(tensor)


def test_the_id_of_an_archive_is_the_one_that_torch_makes() -> None:
    file = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(file)
    shape, content = (2, 3), bytes(24)
    data = archive_head(torch.float32, shape) + content + archive_tail(torch.float32, shape, zlib.crc32(content))
    zipped = zipfile.ZipFile(io.BytesIO(data))
    for name in ("data.pkl", ".format_version", ".storage_alignment", "byteorder", "data/0"):
        record = zipped.read(f"archive/{name}")
        writer.write_record(name, record, len(record))
    writer.write_end_of_file()
    assert file.getvalue() == data


@pytest.mark.slow
def test_an_archive_of_more_than_4_gib(tmp_path: Path) -> None:
    shape = (2**32 + 100,)
    head = archive_head(torch.uint8, shape)
    checksum = 0
    for _ in range(shape[0] // 2**26):
        checksum = zlib.crc32(bytes(2**26), checksum)
    checksum = zlib.crc32(bytes(shape[0] % 2**26), checksum)
    path = tmp_path / "large.pt"
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + shape[0])
        file.seek(len(head) + shape[0])
        file.write(archive_tail(torch.uint8, shape, checksum))
    length = path.stat().st_size
    assert length == archive_length(torch.uint8, shape)
    assert torch.load(path, weights_only=True, mmap=True).shape == shape
    with zipfile.ZipFile(path) as zipped:
        assert zipped.getinfo("archive/data/0").file_size == shape[0]
    with path.open("rb") as file:

        def read(begin: int, end: int) -> bytes:
            file.seek(begin)
            return file.read(end - begin)

        place = tensor_place(read, length, what="large")
    assert (place.begin, place.record.nbytes, place.record.crc32) == (len(head), shape[0], checksum)


@given(tensors(dtype=st.sampled_from(SAVED_DTYPES)), st.data())
def test_strides_views_and_shared_storages_come_back(tensor: torch.Tensor, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(tensor.ndim)))
    turned = tensor.permute(order)
    part = turned.narrow(0, 0, max(turned.shape[0] // 2, 1)) if turned.numel() and turned.ndim else turned
    found = decode(saved([tensor, turned, part]))
    for one, other in zip(found, [tensor, turned, part], strict=True):
        check_same_tensor(one, other)
    assert len({one.untyped_storage().data_ptr() for one in found}) == 1


def test_parameters_come_back_as_tensors() -> None:
    parameter = torch.nn.Parameter(torch.arange(3.0))
    parameter.note = 5  # type: ignore[attr-defined]
    for data in (saved(torch.nn.Parameter(torch.arange(3.0))), saved(parameter), encode_archive(parameter)):
        found = decode(data)
        assert (type(found), found.requires_grad, found.tolist()) == (torch.Tensor, False, [0, 1, 2])


def test_lazily_conjugated_and_negated_tensors_come_back() -> None:
    tensor = torch.arange(3) * (1 + 2j)
    for value in (tensor.conj(), tensor.conj().imag, torch._neg_view(torch.arange(3.0))):
        assert torch.equal(decode(saved(value)), value)
        assert torch.equal(decode(encode_archive(value)), value)
        if value.is_conj() or value.is_neg():
            with pytest.raises(CorruptCheckpoint):
                place_of(saved(value))


def test_the_tree_shares_no_memory_with_the_bytes() -> None:
    data = bytearray(saved(torch.zeros(3)))
    found = decode_archive(data, what="a test")
    data[:] = b"\xff" * len(data)
    assert found.tolist() == [0, 0, 0]


def test_only_a_part_of_a_storage_is_written() -> None:
    assert len(encode_archive(torch.arange(100_000)[5:7])) < 4_000


@pytest.mark.parametrize(
    "tensor",
    [torch.arange(6.0).reshape(2, 3).t(), torch.arange(9)[2:5], torch.ones(1).expand(4), torch.arange(9)[::2]],
    ids=["turned", "a part", "expanded", "steps"],
)
def test_a_place_says_what_is_not_row_major(tensor: torch.Tensor) -> None:
    data = saved(tensor)
    place = place_of(data)
    assert not place.fills_record
    content = bytearray(data[place.begin : place.record.begin + place.record.nbytes])
    found = torch.frombuffer(content, dtype=place.dtype).as_strided(place.shape, place.stride)
    assert torch.equal(found, tensor)


@pytest.mark.parametrize("value", [[torch.zeros(2)], {"a": 1}, (torch.zeros(1), torch.zeros(1)), 5, torch.float32])
def test_a_place_is_of_one_tensor(value: Any) -> None:
    with pytest.raises(CheckpointingException):
        place_of(saved(value))


# ------------------------------------------------------------------------------------------------- old torch


def zipped(records: dict[str, bytes], *, folder: str = "archive", **options: Any) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", **options) as writer:
        for name, content in records.items():
            writer.writestr(f"{folder}/{name}" if folder else name, content)
    return file.getvalue()


def parts(value: Any, **options: Any) -> dict[str, bytes]:
    reader = zipfile.ZipFile(io.BytesIO(saved(value, **options)))
    return {name.removeprefix("archive/"): reader.read(name) for name in reader.namelist()}


def pickled(value: Any, **more: bytes) -> bytes:
    """An archive of any pickle, and of a storage of 24 bytes."""
    return zipped({"data.pkl": write_pickle(value, protocol=2), "data/0": bytes(24), "version": b"3\n", **more})


@pytest.mark.parametrize("folder", ["archive", "model_epoch_3", "", "a/b"])
def test_other_layouts_are_read(folder: str) -> None:
    records = parts({"a": torch.arange(3)})
    old = {name: records[name] for name in ("data.pkl", "data/0", "version")}
    assert decode(zipped(old, folder=folder))["a"].tolist() == [0, 1, 2]
    assert decode(zipped(dict(reversed(records.items())), folder=folder))["a"].tolist() == [0, 1, 2]


def test_records_without_a_checksum_are_read() -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        data = saved(torch.arange(300))
    finally:
        torch.serialization.set_crc32_options(before)
    assert place_of(data).record.crc32 == 0
    assert decode(data).tolist() == list(range(300))


def test_old_storages_are_read() -> None:
    legacy = Reduced(
        Global("torch._utils", "_rebuild_tensor"),
        (Persistent(("storage", Global("torch", "FloatStorage"), "0", "cuda:0", 6)), 0, (2, 3), (3, 1)),
    )
    with_view = Persistent(("storage", Global("torch", "FloatStorage"), "0", "cpu", 6, None))
    assert decode(pickled(legacy)).shape == (2, 3)
    assert decode(pickled(tensor(storage=with_view))).shape == (2, 3)
    assert place_of(pickled(legacy)).shape == (2, 3)


def test_the_form_before_zips_is_named() -> None:
    data = saved(torch.zeros(2), _use_new_zipfile_serialization=False)
    with pytest.raises(UnsafeFile, match=r"torch before 1\.6"):
        decode(data)
    assert decode(data, allow_pickle=True).tolist() == [0, 0]


def test_another_byte_order_is_named() -> None:
    other = b"big" if sys.byteorder == "little" else b"little"
    data = zipped({**parts(torch.zeros(2)), "byteorder": other})
    for read in (decode, place_of):
        with pytest.raises(CorruptCheckpoint, match="byte order"):
            read(data)


def test_programs_are_named() -> None:
    with pytest.raises(UnsafeFile, match="TorchScript"):
        decode(zipped({**parts(torch.zeros(2)), "constants.pkl": b"N."}))


# ------------------------------------------------------------------------------------------------- hostile


FLOAT_STORAGE = Global("torch", "FloatStorage")


def storage(count: Any = 6, key: Any = "0", kind: Any = FLOAT_STORAGE) -> Persistent:
    return Persistent(("storage", kind, key, "cpu", count))


FLOATS = storage()


def tensor(
    offset: Any = 0, shape: Any = (2, 3), stride: Any = (3, 1), storage: Any = FLOATS, extra: tuple[Any, ...] = ()
) -> Reduced:
    hooks = Reduced(Global("collections", "OrderedDict"), ())
    return Reduced(Global("torch._utils", "_rebuild_tensor_v2"), (storage, offset, shape, stride, False, hooks, *extra))


BAD_TENSORS = {
    "offset beyond the storage": tensor(offset=1),
    "offset negative": tensor(offset=-1),
    "offset a float": tensor(offset=1.0),
    "stride beyond the storage": tensor(stride=(4, 1)),
    "stride negative": tensor(stride=(-3, 1)),
    "shape beyond the storage": tensor(shape=(3, 3)),
    "shape negative": tensor(shape=(-2, -3)),
    "shape of booleans": tensor(shape=(True, True)),
    "shape without strides": tensor(stride=()),
    "shape of 70 axes": tensor(shape=(1,) * 70, stride=(1,) * 70),
    "shape of 64 bits": tensor(shape=(2**62, 2**62), stride=(0, 0)),
    "shape of nothing and of 64 bits": tensor(shape=(0, 2**70), stride=(1, 1)),
    "expanded to terabytes": tensor(shape=(2**40,), stride=(0,)),
    "storage longer than its record": tensor(storage=storage(7)),
    "storage of negative length": tensor(storage=storage(-6)),
    "storage without a record": tensor(storage=storage(key="1")),
    "storage without a name": tensor(storage=storage(key=0)),
    "storage outside": tensor(storage=storage(key="../../etc/passwd")),
    "storage of no class": tensor(storage=storage(kind="FloatStorage")),
    "storage of a dtype": tensor(storage=storage(kind=Global("torch", "float32"))),
    "no storage": tensor(storage=(1, 2)),
    "untyped storage": tensor(storage=storage(kind=Global("torch", "UntypedStorage"))),
    "quantised dtype": Reduced(
        Global("torch._utils", "_rebuild_tensor_v3"),
        (storage(), 0, (2,), (1,), False, {}, Global("torch", "qint8")),
    ),
    "unknown metadata": tensor(extra=({"evil": True},)),
    "persistent id of something else": Persistent(("module", "os")),
    "parameter of a list": Reduced(Global("torch._utils", "_rebuild_parameter"), ([1], False, {})),
    "too few arguments": Reduced(Global("torch._utils", "_rebuild_tensor_v2"), (storage(),)),
    "a storage alone": {"a": storage()},
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_tensors_that_contradict_their_storage_are_refused(case: str) -> None:
    data = pickled(BAD_TENSORS[case])
    for read in (decode, place_of):
        with pytest.raises(CorruptCheckpoint, match="a test"):
            read(data)


def call(module: str, name: str, *args: Any, state: Any = None) -> Reduced:
    return Reduced(Global(module, name), args, state)


def dtype(name: str, order: str = "<", **changes: Any) -> Reduced:
    state = [3, order, None, None, None, -1, -1, 0]
    for place, value in changes.items():
        state[int(place[1:])] = value
    return call("numpy", "dtype", name, False, True, state=tuple(state))


def array(state: Any) -> Reduced:
    args = (Global("numpy", "ndarray"), (0,), b"b")
    return Reduced(Global("numpy.core.multiarray", "_reconstruct"), args, state)


BAD_VALUES = {
    "array of objects": array((1, (1,), dtype("O8", "|"), False, [Global("os", "system")])),
    "array of records": array((1, (1,), dtype("V8", "|"), False, bytes(8))),
    "array of wrong length": array((1, (3,), dtype("f4"), False, bytes(8))),
    "array of negative shape": array((1, (-1, -2), dtype("f4"), False, bytes(8))),
    "array of no shape": array((1, 2, dtype("f4"), False, bytes(8))),
    "array of no dtype": array((1, (2,), "f4", False, bytes(8))),
    "array of no order": array((1, (2,), dtype("f4"), 5, bytes(8))),
    "array of no character": array((1, (1,), dtype("U1", "<", s5=4, s6=4, s7=8), False, b"\xff" * 4)),
    "array of nothing": array((1, (2**40,), dtype("S0", "|"), False, b"")),
    "array of a short state": array((1,)),
    "array of a subclass": call("numpy.core.multiarray", "_reconstruct", 5, (0,), b"b"),
    "dtype with names": dtype("f4", "<", s3=("a",), s4={"a": 1}),
    "dtype of another size": dtype("S8", "|", s5=800),
    "dtype of another order": dtype("f4", "?"),
    "dtype of a new version": dtype("f4", "<", s0=5),
    "dtype of code": call("numpy", "dtype", "O"),
    "dtype of fields": call("numpy", "dtype", "f4,f4"),
    "dtype of no text": call("numpy", "dtype", 5),
    "scalar of two": call("numpy.core.multiarray", "scalar", dtype("f4"), bytes(8)),
    "scalar of objects": call("numpy.core.multiarray", "scalar", dtype("O8", "|"), bytes(8)),
    "buffer of a number": call("numpy._core.numeric", "_frombuffer", 5, dtype("f4"), (1,), "C"),
    "bytes by a number": call("builtins", "bytes", 2**40),
    "bytearray by a number": call("builtins", "bytearray", 2**40),
    "bytes by another codec": call("_codecs", "encode", "a", "zlib"),
    "list of a range": call("builtins", "list", call("builtins", "range", 0, 2**40, 1)),
    "set of a text": call("builtins", "set", "abc"),
    "range of step 0": call("builtins", "range", 0, 1, 0),
    "complex of text": call("builtins", "complex", "1+2j"),
    "deque that drops items": call("collections", "deque", [1, 2], 1),
    "defaultdict of a function": call("collections", "defaultdict", 5),
    "defaultdict of a constructor": call("collections", "defaultdict", Global("torch", "Size")),
    "namespace of a list": call("argparse", "Namespace", state=[1]),
    "namespace of numbers": call("argparse", "Namespace", state={1: 2}),
    "namespace with arguments": call("argparse", "Namespace", 5),
    "buffer far away": call("_io", "BytesIO", state=(b"abc", 2**80, None)),
    "buffer before its begin": call("_io", "BytesIO", state=(b"abc", -1, None)),
    "buffer with attributes": call("_io", "BytesIO", state=(b"abc", 0, {"read": 5})),
    "path of a number": call("pathlib", "PosixPath", 5),
    "device of code": call("torch", "device", "cpu:__import__"),
    "device unknown": call("torch", "device", "abacus"),
    "size of floats": call("torch", "Size", (1.5,)),
    "layout unknown": call("torch.serialization", "_get_layout", "torch.evil"),
    "a class": {"a": Global("collections", "OrderedDict")},
    "a storage's class": Global("collections", "deque"),
}


@pytest.mark.parametrize("case", BAD_VALUES)
def test_values_that_contradict_themselves_are_refused(case: str) -> None:
    with pytest.raises(CorruptCheckpoint, match="a test"):
        decode(pickled(BAD_VALUES[case]))


def test_wrong_flags_of_a_dtype_are_not_believed() -> None:
    found = decode(pickled(array((1, (1,), dtype("S8", "|", s5=8, s6=1, s7=0x3F), False, b"\xff" * 8))))
    assert not found.dtype.hasobject
    assert found.tolist() == [b"\xff" * 8]


FORBIDDEN = [
    ("os", "system"),
    ("builtins", "eval"),
    ("builtins", "getattr"),
    ("__builtin__", "apply"),
    ("torch", "load"),
    ("torch._utils", "_rebuild_device_tensor_from_numpy"),
    ("torch._tensor", "_rebuild_from_type_v2"),
    ("torch.storage", "_load_from_bytes"),
    ("numpy", "load"),
    ("collections", "namedtuple"),
    ("copyreg", "_reconstructor"),
    ("functools", "partial"),
    ("datetime", "datetime"),
    ("_io", "FileIO"),
    ("types", "CodeType"),
    ("types", "FunctionType"),
]


@pytest.mark.parametrize("name", FORBIDDEN, ids=".".join)
def test_names_outside_of_the_list_are_refused(name: tuple[str, str]) -> None:
    data = pickled(call(*name, "echo ran"))
    for read in (decode, place_of):
        with pytest.raises(UnsafeFile, match=r"a test: it names " + ".".join(name)):
            read(data)


SPECIAL = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "quantised": lambda: torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8),
    "meta": lambda: torch.empty(2, device="meta"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", SPECIAL)
def test_tensors_that_are_more_than_strided_bytes_are_named(case: str) -> None:
    data = saved([SPECIAL[case]()])
    with pytest.raises(UnsupportedValue, match=f"a test: a.*{case}"):
        decode(data)
    assert decode(data, allow_pickle=True)[0].shape == SPECIAL[case]().shape
    with pytest.raises(UnsupportedValue, match=r"tree\[0\]"):
        encode_archive([SPECIAL[case]()])


def test_what_megatron_keeps_in_its_arguments_comes_back() -> None:
    enums = "megatron.core.transformer.enums"
    member = call(enums, "AttnBackend", 3)
    config = call("megatron.core.optimizer.optimizer_config", "OptimizerConfig", state={"lr": 0.1})
    space = call("argparse", "Namespace", state={"a": member, "b": config, "c": call("signal", "Signals", 15)})
    found = decode(pickled(space))
    assert found.a == Record(f"{enums}.AttnBackend", {"name": None, "value": 3})
    assert found.b == Record("megatron.core.optimizer.optimizer_config.OptimizerConfig", {"lr": 0.1})
    assert found.c is signal.SIGTERM


def test_what_megatron_keeps_is_written_again_as_it_was() -> None:
    enums, config = "megatron.core.transformer.enums", "megatron.core.optimizer.optimizer_config"
    value = Namespace(
        a=Record(f"{enums}.AttnBackend", {"name": None, "value": 3}),
        b=[Record("megatron.core.rerun_state_machine.RerunMode", {"name": None, "value": "disabled"})] * 2,
        c=Record(f"{config}.OptimizerConfig", {"lr": 0.1, "weights": torch.ones(2)}),
    )
    data = encode_archive(value)
    assert {name for name in pickletools_names(data) if "megatron" in name} == {
        f"{enums} AttnBackend",
        "megatron.core.rerun_state_machine RerunMode",
        f"{config} OptimizerConfig",
    }
    found = decode(data)
    assert (found.a, found.b) == (value.a, value.b)
    assert found.c.fields["lr"] == 0.1
    assert torch.equal(found.c.fields["weights"], torch.ones(2))


@pytest.mark.parametrize(
    "record",
    [
        Record("megatron.core.enums.ModelType", {"name": "encoder_or_decoder", "value": 1}),
        Record("megatron.core.enums.ModelType", {"value": 1}),
        Record("megatron.core.enums.Other", {"name": None, "value": 1}),
    ],
)
def test_a_record_that_no_archive_gives_is_not_written(record: Record) -> None:
    with pytest.raises(UnsupportedValue, match=r"tree\[0\]"):
        encode_archive([record])


def pickletools_names(data: bytes) -> set[str]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        return {str(arg) for op, arg, _ in pickletools.genops(archive.read(name)) if op.name == "GLOBAL"}


@pytest.mark.peers
def test_megatrons_own_classes_come_back_and_as_they_are_where_they_are_named() -> None:
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.enums import AttnBackend

    value = Namespace(backend=AttnBackend.auto, config=OptimizerConfig(lr=0.1))
    for data in (saved(value), encode_archive(value)):
        plain = decode(data)
        assert plain.backend.fields["value"] == AttnBackend.auto.value
        assert plain.config.fields["lr"] == 0.1
        named = decode(data, types=(AttnBackend, OptimizerConfig))
        assert named.backend is AttnBackend.auto
        assert named.config == value.config
        again = torch.load(io.BytesIO(encode_archive(plain)), weights_only=False)
        assert again == value
        assert decode_tree(encode_tree(plain.backend), types=(AttnBackend,)) is AttnBackend.auto


@given(st.data())
def test_any_calls_of_the_table_are_read_or_refused(data: st.DataObject) -> None:
    from shardtree.formats.archives._decode import _CLASSES

    names = st.sampled_from(sorted(_CLASSES)).map(lambda name: Global(*name))
    leaves = st.none() | st.integers(-3, 3) | st.sampled_from([2**40, 2.5, "f4", "U4", "latin1", b"abc", True, "0"])
    values = st.recursive(
        leaves | names | st.just(storage()),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.builds(
                Reduced,
                names,
                st.lists(inner, max_size=5).map(tuple),
                st.none() | st.lists(inner, max_size=9).map(tuple),
            ),
        ),
        max_leaves=8,
    )
    archive = pickled(data.draw(values))
    for read in (decode, place_of):
        with suppress(CheckpointingException):
            read(archive)


SAMPLE = saved({"a": torch.arange(3), "b": [1, "text", (2.5, None)], "c": np.arange(2)})


def test_an_archive_that_ends_early_is_corrupt() -> None:
    whole = archive_head(torch.uint8, (3,)) + b"abc" + archive_tail(torch.uint8, (3,), zlib.crc32(b"abc"))
    for end in range(len(whole)):
        for read in (decode, place_of):
            with pytest.raises(CorruptCheckpoint, match="a test"):
                read(whole[:end])


def undetected(data: bytes, read: Callable[[bytes], Any]) -> list[int]:
    """Return the bytes of records that can be flipped without an error."""
    reader = zipfile.ZipFile(io.BytesIO(data))
    spans = []
    for entry in reader.infolist():
        *_, name, extra = struct.unpack_from("<4s5H3I2H", data, entry.header_offset)
        begin = entry.header_offset + 30 + name + extra
        spans.append(range(begin, begin + entry.file_size))
    missed = []
    for place in (place for span in spans for place in span):
        flipped = bytearray(data)
        flipped[place] ^= 0x10
        try:
            read(bytes(flipped))
        except CheckpointingException:
            continue
        missed.append(place)
    return missed


def test_every_flipped_byte_of_a_record_is_found() -> None:
    assert undetected(SAMPLE, decode) == []


def load_or_refuse(data: bytes) -> Any:
    try:
        return torch.load(io.BytesIO(data))
    except Exception as error:
        raise CorruptCheckpoint from error


def test_the_law_of_flipped_bytes_catches_torch() -> None:
    """The planted fault: torch.load doesn't look at checksums."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert undetected(saved(torch.zeros(8)), load_or_refuse) != []


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_read_or_refused(data: bytes, is_zip: bool) -> None:
    for read in (decode, place_of):
        with pytest.raises(CheckpointingException):
            read(b"PK\3\4" + data if is_zip else data)


def overlapping() -> bytes:
    """An archive whose directory has the record of a storage a hundred times."""
    records = {"data.pkl": write_pickle([]), **{f"data/{number}": b"" for number in range(100)}}
    data = bytearray(zipped(records))
    first = data.find(b"archive/data/0") - 30
    data[first : first + 30]
    place = data.find(b"PK\1\2")
    while place >= 0:
        if data[place + 46 :].startswith(b"archive/data/"):
            data[place + 42 : place + 46] = struct.pack("<I", first)
        place = data.find(b"PK\1\2", place + 1)
    return bytes(data)


def patched(offset_in_entry: int, value: bytes) -> bytes:
    """An archive with a field of its first directory entry changed."""
    data = bytearray(zipped(parts(torch.zeros(2))))
    place = data.find(b"PK\1\2") + offset_in_entry
    data[place : place + len(value)] = value
    return bytes(data)


def end_patched(offset: int, value: bytes) -> bytes:
    data = bytearray(zipped(parts(torch.zeros(2))))
    place = len(data) - 22 + offset
    data[place : place + len(value)] = value
    return bytes(data)


def twice() -> bytes:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as writer:
            for name in ("data.pkl", "data.pkl"):
                writer.writestr(f"archive/{name}", b"N.")
        return file.getvalue()


BAD_ZIPS: dict[str, Callable[[], bytes]] = {
    "no pickle": lambda: zipped({"version": b"3\n"}),
    "no records": lambda: zipped({}),
    "compressed": lambda: zipped(parts(torch.zeros(200)), compression=zipfile.ZIP_DEFLATED),
    "encrypted": lambda: patched(8, b"\x01\x00"),
    "two of one name": twice,
    "overlapping": overlapping,
    "begins after the end": lambda: patched(42, b"\xff\xff\xff\x7f"),
    "longer than the archive": lambda: patched(20, b"\xff\xff\xff\x7f" * 2),
    "two lengths": lambda: patched(20, b"\x01\x00\x00\x00"),
    "zip64 without a field": lambda: patched(20, b"\xff" * 8),
    "name beyond the directory": lambda: patched(28, b"\xff\xff"),
    "another name": lambda: patched(46, b"evil"),
    "many entries": lambda: end_patched(8, b"\xf0\xf0\xf0\xf0"),
    "directory beyond the end": lambda: end_patched(16, b"\xff\xff\xff\x7f"),
    "zip64 without a locator": lambda: end_patched(16, b"\xff\xff\xff\xff"),
    "a comment": lambda: end_patched(20, b"\x05\x00") + b"hello",
    "no end": lambda: zipped(parts(torch.zeros(2))) + bytes(100),
    "an archive behind another": lambda: saved(torch.zeros(2)) + saved(torch.ones(2)),
    "empty": lambda: b"",
    "one byte": lambda: b"P",
    "text": lambda: b"hello world",
}


@pytest.mark.parametrize("case", BAD_ZIPS)
def test_bad_zips_are_corrupt(case: str) -> None:
    data = BAD_ZIPS[case]()
    for read in (decode, place_of):
        with pytest.raises(CorruptCheckpoint, match="a test"):
            read(data)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["builtins.set", "collections.Counter", "collections.defaultdict", f"{__name__}.Color", "builtins.dict"]
)
def test_bombs_in_arguments_are_refused_quickly(name: str) -> None:
    module, _, kind = name.rpartition(".")
    bomb = b"N\x85" + b"2\x86" * 60
    pairs = {"set": b"](" + bomb + b"e\x85", "Color": bomb + b"\x85", "defaultdict": b"N](" + bomb + b"N\x86e\x86"}
    args = pairs.get(kind, b"](" + bomb + b"N\x86e\x85")
    data = zipped({"data.pkl": f"c{module}\n{kind}\n".encode() + args + b"R."})
    with pytest.raises(CorruptCheckpoint, match="too long to hash"):
        decode(data, types=(Color,))


def test_large_expanded_tensors_in_great_number_take_no_memory() -> None:
    data = pickled([tensor(shape=(2**20,), stride=(0,)) for _ in range(1_000)])
    begin = time.process_time()
    assert len(decode(data)) == 1_000
    assert time.process_time() - begin < 10


# ------------------------------------------------------------------------------------------------- records


def test_a_record_beside_torchs_own_is_found_and_passed_over() -> None:
    value = {"a": torch.arange(5), "b": [1]}
    data = add_record(encode_archive(value), ".note", b"hello")
    assert find_record(data, ".note", what="a test") == b"hello"
    assert find_record(encode_archive(value), ".note", what="a test") is None
    assert find_record(b"not an archive", ".note", what="a test") is None
    assert outline(decode(data)) == outline(value)
    assert outline(torch.load(io.BytesIO(data), weights_only=True)) == outline(value)
    assert zipfile.ZipFile(io.BytesIO(data)).testzip() is None
