"""Trees of values: decode ∘ encode = identity, with exact types."""

from __future__ import annotations

import contextlib
import dataclasses
import struct
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from io import BytesIO
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from shardtree.core.codec import HeaderEntry, decode_header, decode_tree, encode_header, encode_tree
from shardtree.errors import CheckpointingException, TreeError, UnsafeFile, UnsupportedValue
from shardtree.testing import outline
from shardtree.trees import HOLE, Record


def told(value: Any) -> Any:  # noqa: C901
    """Return what a value is in a form that == compares: its type, order, bits of numbers, and all that it holds."""
    kind = type(value)
    match value:
        case torch.Tensor():
            return outline(value), value.requires_grad
        case np.generic():
            return kind, value.dtype.str, value.tobytes(), str(value) if isinstance(value, np.str_) else ""
        case complex():
            return kind, struct.pack("dd", value.real, value.imag)
        case deque():
            return kind, value.maxlen, list(map(told, value))
        case dict():
            return kind, str(getattr(value, "default_factory", None)), list(map(told, value.items()))
        case set() | frozenset():
            return kind, sorted(map(told, value), key=repr)
        case BytesIO():
            return kind, value.getvalue(), value.tell()
        case Namespace() | Record():
            return kind, getattr(value, "type_name", None), told(vars(value) if kind is Namespace else value.fields)
        case torch.Size():
            return kind, list(value)
        case list() | tuple():
            return kind, list(map(told, value))
    return outline(value)


def same_value(one: Any, other: Any) -> bool:
    return bool(told(one) == told(other))


NUMPY_DTYPES = [
    "?",
    "i1",
    "u2",
    "<i4",
    ">i4",
    "u8",
    "f2",
    "<f4",
    ">f8",
    "g",
    "c8",
    "c16",
    "M8[ns]",
    "m8[25s]",
    "U3",
    "S2",
]
TORCH_DTYPES = [torch.bool, torch.uint8, torch.int16, torch.int64, torch.bfloat16, torch.float64, torch.complex64]
TORCH_DTYPES += [torch.complex128, torch.float8_e4m3fn, torch.uint3, torch.bits16, torch.float4_e2m1fn_x2]
FACTORIES = [None, bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict]


def tensors() -> st.SearchStrategy[torch.Tensor]:
    shapes = st.lists(st.integers(0, 3), max_size=3)
    return st.builds(_tensor, st.sampled_from(TORCH_DTYPES), shapes)


def _tensor(dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    count = int(np.prod(shape))
    bits = torch.arange(count * dtype.itemsize, dtype=torch.uint8) % (2 if dtype is torch.bool else 251)
    return bits.view(dtype).reshape(shape)


def arrays() -> st.SearchStrategy[Any]:
    shapes = st.lists(st.integers(0, 3), max_size=3)
    return st.builds(lambda name, shape: np.ones(shape, "u1").astype(name), st.sampled_from(NUMPY_DTYPES), shapes)


def scalars() -> st.SearchStrategy[Any]:
    numbers = st.sampled_from(["?", "i1", "u2", "i4", "u8", "f2", "f4", "f8", "g", "c8", "c16"])
    dates = st.sampled_from([np.datetime64("2020-01-01"), np.datetime64("NaT"), np.timedelta64(3, "25s")])
    return st.builds(lambda name, value: np.dtype(name).type(value), numbers, st.sampled_from([0, 1])) | dates


SIMPLE = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**200), 2**200)
    | st.floats()
    | st.sampled_from([0.0, -0.0, float("nan"), float("-inf")])
    | st.complex_numbers()
    | st.text(st.characters(), max_size=4)
    | st.text(st.characters(categories=["Cs"]), max_size=4)
    | st.binary(max_size=4)
    | scalars()
    | st.builds(np.str_, st.text("a\0", max_size=3))
    | st.builds(np.bytes_, st.binary(max_size=3))
    | st.builds(range, st.integers(), st.integers(), st.integers(1))
    | st.sampled_from([torch.float32, torch.qint8, torch.device("cpu"), torch.device("cuda:1"), torch.Size([2, 0])])
    | st.builds(Path, st.text("a/.", max_size=3))
    | st.sampled_from([PurePosixPath("a/b"), PureWindowsPath("c:\\d"), PureWindowsPath("..")])
    | st.just(HOLE)
)
KEYS = st.recursive(
    SIMPLE, lambda inner: st.lists(inner, max_size=2).map(tuple) | st.frozensets(inner, max_size=2), max_leaves=3
)
LEAVES = (
    SIMPLE
    | tensors()
    | arrays()
    | st.builds(bytearray, st.binary(max_size=4))
    | st.builds(slice, st.none() | st.integers(), st.integers(), st.text(max_size=2))
)


def _buffer(data: bytes, position: int) -> BytesIO:
    buffer = BytesIO(data)
    buffer.seek(position)
    return buffer


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    items = st.lists(inner, max_size=3)
    dicts = st.dictionaries(KEYS, inner, max_size=3)
    return (
        items
        | items.map(tuple)
        | st.builds(lambda values, more: deque(values, len(values) + more), items, st.integers(0, 2))
        | items.map(deque)
        | st.sets(KEYS, max_size=3)
        | st.frozensets(KEYS, max_size=3)
        | dicts
        | st.dictionaries(st.text(max_size=3) | st.just("$"), inner, max_size=3)
        | dicts.map(OrderedDict)
        | dicts.map(Counter)
        | st.builds(defaultdict, st.sampled_from(FACTORIES), dicts)
        | st.builds(_buffer, st.binary(max_size=4), st.integers(0, 6))
        | st.dictionaries(st.text(max_size=3), inner, max_size=3).map(_namespace)
        | st.builds(Record, st.text(max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3))
    )


def _namespace(fields: dict[str, Any]) -> Namespace:
    value = Namespace()
    vars(value).update(fields)
    return value


VALUES = st.recursive(LEAVES, _containers, max_leaves=8)


@pytest.mark.slow
@settings(max_examples=200)
@given(VALUES)
def test_decode_undoes_encode(value: Any) -> None:
    assert same_value(decode_tree(encode_tree(value)), value)


FLAT = _containers(SIMPLE)
FAULTS: dict[str, tuple[st.SearchStrategy[Any], Callable[[Any], Any]]] = {
    "tuples are lists": (FLAT, lambda value: list(value) if type(value) is tuple else value),
    "no signed zero": (st.floats(), lambda value: value + 0.0),
}


@pytest.mark.parametrize("name", FAULTS)
def test_decode_undoes_encode_catches(name: str) -> None:
    values, fault = FAULTS[name]

    def is_caught(value: Any) -> bool:
        return not same_value(fault(decode_tree(encode_tree(value))), value)

    find(values, is_caught, settings=settings(max_examples=3000, database=None, phases=[Phase.generate]))


@settings(max_examples=100)
@given(st.data())
def test_damaged_bytes_are_a_value_or_an_error(data: st.DataObject) -> None:
    file = bytearray(encode_tree(data.draw(VALUES)))
    for position in data.draw(st.lists(st.integers(0, len(file) - 1), max_size=3)):
        file[position] ^= 1 << data.draw(st.integers(0, 7))
    stop = data.draw(st.integers(0, len(file)) | st.just(len(file)))
    with contextlib.suppress(CheckpointingException):
        decode_tree(file[:stop])


@given(st.dictionaries(st.text(max_size=3), tensors(), max_size=4), st.binary(max_size=9))
def test_entries_are_aligned_to_their_items(tree: dict[str, torch.Tensor], odd: bytes) -> None:
    file = encode_tree([odd, tree])
    entries, start = decode_header(file, len(file))
    sizes = {"C64": 8, "F64": 8, "I64": 8, "BF16": 2, "I16": 2}
    assert start % 64 == 0
    assert all(entry.start % sizes.get(entry.tag, 1) == 0 for entry in entries)


@pytest.mark.peers
def test_the_safetensors_package_reads_the_tensors() -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    found = safetensors.torch.load(encode_tree({"step": 7, "weight": weight}))
    assert torch.equal(found["0"], weight)
    text = bytes(found["structure"].tolist())
    assert text == b'{"step":7,"weight":{"$":"tensor","entry":"0"}}'


def test_parameters_come_back_as_plain_tensors() -> None:
    found = decode_tree(encode_tree(torch.nn.Parameter(torch.ones(2, 3)).t()))
    assert type(found) is torch.Tensor
    assert not found.requires_grad
    assert found.is_contiguous()
    assert torch.equal(decode_tree(encode_tree(torch.nn.Parameter(torch.ones(2)))), torch.ones(2))


def test_tensors_and_arrays_own_their_memory() -> None:
    file = bytearray(encode_tree([torch.ones(4), np.ones(4), bytearray(b"abc")]))
    tensor, array, _ = decode_tree(file)
    file[:] = bytes(len(file))
    assert tensor.tolist() == array.tolist() == [1.0] * 4
    assert tensor.untyped_storage().nbytes() == 16
    assert array.flags.owndata
    assert array.flags.writeable


def test_a_tensor_in_two_places_comes_back_as_two() -> None:
    weight = torch.ones(2)
    one, other = decode_tree(encode_tree([weight, weight]))
    assert torch.equal(one, other)
    assert one.data_ptr() != other.data_ptr()


def test_the_attributes_of_an_ordered_dict_are_dropped() -> None:
    state = torch.nn.Linear(2, 2).state_dict()
    found = decode_tree(encode_tree(state))
    assert type(found) is OrderedDict
    assert not hasattr(found, "_metadata")
    assert list(found) == ["weight", "bias"]


def test_sets_are_encoded_alike_in_every_order() -> None:
    one, other = set([0, 8, "a"]), set([8, 0, "a"])  # noqa: C405
    assert [item for item in one if item != "a"] != [item for item in other if item != "a"]
    assert encode_tree(one) == encode_tree(other)


class Text(str):
    __slots__ = ()


@dataclasses.dataclass
class Both(dict):
    loss: float = 0.0


class Table(dict):
    pass


class Row(list):
    pass


UNSUPPORTED: dict[str, tuple[Any, str]] = {
    "object": ({"m": [object()]}, r"tree\['m'\]\[0\] cannot be stored\n  found object"),
    "function": ({"m": {"f": len}}, r"tree\['m'\]\['f'\](.|\n)*builtin_function"),
    "class": ((int,), r"tree\[0\](.|\n)*found type"),
    "in a set": ({"m": {len}}, r"tree\['m'\] cannot"),
    "as a key": ({"m": {len: 1}}, r"tree\['m'\] cannot"),
    "subclass of str": ([Text("a")], r"Text"),
    "subclass of dict": ([Table(a=1)], r"found (.|\n)*Table\n  Store dict\(value\)"),
    "subclass of list": ([Row([1])], r"found (.|\n)*Row\n  Store list\(value\)"),
    "dataclass that is a dict": ([Both()], r"Both"),
    "structseq of torch": ([torch.ones(2, 2).max(dim=0)], r"torch\.return_types\.max"),
    "defaultdict of a function": ([defaultdict(lambda: 0)], r"whose factory is (.|\n)*lambda"),
    "array of objects": ([np.array([object()])], r"numpy\.ndarray \(object\)"),
    "structured array": ([np.zeros(2, "i4,f4")], r"numpy\.ndarray"),
    "subclass of array": ([np.ma.array([1])], r"MaskedArray"),
    "sparse": ([torch.eye(2).to_sparse()], r"sparse_coo"),
    "meta": ([torch.ones(2, device="meta")], r"meta"),
    "generator": ([torch.Generator()], r"torch.*Generator"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_other_values_are_named(name: str) -> None:
    value, reason = UNSUPPORTED[name]
    with pytest.raises(UnsupportedValue, match=reason) as caught:
        encode_tree(value)
    assert "allow_pickle=True" in str(caught.value)


def test_pickles_are_loaded_only_where_they_are_asked_for() -> None:
    file = encode_tree({"a": 1, "m": [Table(a=1)]}, allow_pickle=True)
    with pytest.raises(UnsafeFile, match=r"tree\['m'\]\[0\] is a pickle"):
        decode_tree(file)
    assert decode_tree(file, allow_pickle=True) == {"a": 1, "m": [Table(a=1)]}
    with pytest.raises(UnsupportedValue, match=r"tree\[0\] cannot be pickled"):
        encode_tree([lambda: 0], allow_pickle=True)


def test_a_cycle_is_named() -> None:
    inner: dict[str, Any] = {}
    inner["x"] = [inner]
    with pytest.raises(TreeError, match=r"contains itself at tree\['a'\]\['x'\]"):
        encode_tree({"a": inner})


def _nested(depth: int, wrap: Callable[[Any], Any]) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = wrap(value)
    return value


WRAPS: list[Callable[[Any], Any]] = [
    lambda value: [value],
    lambda value: {"a": value},
    lambda value: {1: value},
    lambda value: (value,),
    lambda value: frozenset([value]),
]


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_hundred_levels_are_the_limit(wrap: Callable[[Any], Any]) -> None:
    value = _nested(100, wrap)
    assert same_value(decode_tree(encode_tree(value)), value)
    for depth in (101, 5000):
        with pytest.raises(TreeError, match="more than 100 deep"):
            encode_tree(_nested(depth, wrap))


def test_a_path_of_another_platform_can_be_named() -> None:
    structure = b'[{"$":"path","type":"WindowsPath","text":"a\\\\b"}]'
    windows = encode_header([HeaderEntry("structure", "U8", (len(structure),), 0, len(structure))]) + structure
    (found,) = decode_tree(windows)
    assert isinstance(found, PurePath)
    assert found.parts == ("a", "b")
