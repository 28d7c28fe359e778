"""Files that somebody made to hurt: an error, quickly, and no code is run."""

from __future__ import annotations

import contextlib
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtree.core.codec import HeaderEntry, decode_tree, encode_header
from shardtree.core.codec._tree import _DECODERS
from shardtree.errors import CheckpointingException, CorruptCheckpoint, UnsafeFile, UnsupportedValue


def file_of(structure: Any, *blobs: tuple[str, list[int], bytes]) -> bytes:
    """A well-formed file of entries "0", "1", … and any structure, as JSON or as text."""
    text = structure if isinstance(structure, bytes) else json.dumps(structure).encode()
    named = [("structure", "U8", [len(text)], text), *((str(n), *blob) for n, blob in enumerate(blobs))]
    entries, start = [], 0
    for name, tag, shape, data in named:
        entries.append(HeaderEntry(name, tag, tuple(shape), start, start + len(data)))
        start += len(data)
    return encode_header(entries) + b"".join(data for *_, data in named)


ABC = ("U8", [3], b"abc")
FOUR = ("F32", [1], bytes(4))

MALFORMED: dict[str, tuple[Any, ...]] = {
    "not JSON": (b"{",),
    "deep lists": (b"[" * 200 + b"]" * 200,),
    "very deep lists": (b"[" * 100_000 + b"]" * 100_000,),
    "deep tuples": (b'{"$":"tuple","items":[' * 200 + b"]}" * 200,),
    "kind unknown": ({"$": "os.system"},),
    "kind is not text": ({"$": ["tuple"]},),
    "kind null": ({"$": None},),
    "member missing": ({"$": "tuple"},),
    "member too many": ({"$": "tuple", "items": [], "more": 1},),
    "items are not a list": ({"$": "tuple", "items": {"a": 1}},),
    "items are text": ({"$": "set", "items": "abc"},),
    "set of lists": ({"$": "set", "items": [[]]},),
    "set with twins": ({"$": "frozenset", "items": [1, True]},),
    "dict with twins": ({"$": "dict", "items": [[1, 2], [1, 3]]},),
    "dict of lists": ({"$": "dict", "items": [[[], 1]]},),
    "dict of triples": ({"$": "dict", "items": [[1, 2, 3]]},),
    "dict of text": ({"$": "OrderedDict", "items": ["ab"]},),
    "factory unknown": ({"$": "defaultdict", "factory": "eval", "items": []},),
    "factory is a list": ({"$": "defaultdict", "factory": [], "items": []},),
    "int is not hexadecimal": ({"$": "int", "hex": "1_0"},),
    "int is a number": ({"$": "int", "hex": 10},),
    "int of many digits": (b"[" + b"9" * 1_000_000 + b"]",),
    "float of 3 bytes": ({"$": "float", "bits": "000000"},),
    "complex of a float": ({"$": "complex", "bits": "00" * 8},),
    "str is not UTF-8": ({"$": "str", "hex": "ff"},),
    "range of step 0": ({"$": "range", "start": 0, "stop": 1, "step": 0},),
    "range of floats": ({"$": "range", "start": 0, "stop": 1.5, "step": 1},),
    "deque of negative length": ({"$": "deque", "maxlen": -1, "items": []},),
    "deque longer than memory": ({"$": "deque", "maxlen": 2**70, "items": []},),
    "deque that drops items": ({"$": "deque", "maxlen": 1, "items": [1, 2]},),
    "deque of bool": ({"$": "deque", "maxlen": True, "items": []},),
    "device with code": ({"$": "torch.device", "name": "__import__('os')"},),
    "device unknown": ({"$": "torch.device", "name": "abacus:0"},),
    "size of floats": ({"$": "torch.Size", "lengths": [1.5]},),
    "path of no kind": ({"$": "path", "type": "Popen", "text": "a"},),
    "path of a number": ({"$": "path", "type": "PosixPath", "text": 1},),
    "namespace of ints": ({"$": "argparse.Namespace", "fields": {"$": "dict", "items": [[1, 2]]}},),
    "namespace of a list": ({"$": "argparse.Namespace", "fields": [1]},),
    "record without a name": ({"$": "record", "type": 1, "fields": {}},),
    "record of a list": ({"$": "record", "type": "a.B", "fields": []},),
    "entry that is not there": ({"$": "bytes", "entry": "9"},),
    "entry is the structure": ({"$": "bytes", "entry": "structure"},),
    "entry is a number": ({"$": "bytes", "entry": 0}, ABC),
    "entry used twice": ([{"$": "bytes", "entry": "0"}, {"$": "bytes", "entry": "0"}], ABC),
    "entry unused": ([], ABC),
    "bytes of floats": ({"$": "bytes", "entry": "0"}, FOUR),
    "position negative": ({"$": "io.BytesIO", "position": -1, "entry": "0"}, ABC),
    "position over 64 bits": ({"$": "io.BytesIO", "position": 2**80, "entry": "0"}, ABC),
    "tensor of wrong length": ({"$": "tensor of bytes", "dtype": "uint8", "shape": [4], "entry": "0"}, ABC),
    "tensor of negative shape": ({"$": "tensor of bytes", "dtype": "uint8", "shape": [-1, -3], "entry": "0"}, ABC),
    "tensor larger than memory": ({"$": "tensor of bytes", "dtype": "uint8", "shape": [2**62, 8], "entry": "0"}, ABC),
    "tensor empty and huge": (
        {"$": "tensor of bytes", "dtype": "int8", "shape": [0, 2**62, 4], "entry": "0"},
        ("U8", [0], b""),
    ),
    "tensor quantised": ({"$": "tensor of bytes", "dtype": "qint8", "shape": [3], "entry": "0"}, ABC),
    "array of bfloat16": ({"$": "ndarray", "entry": "0"}, ("BF16", [1], bytes(2))),
    "array of objects": ({"$": "ndarray of bytes", "dtype": "|O8", "shape": [1], "entry": "0"}, ("U8", [8], bytes(8))),
    "array of records": ({"$": "ndarray of bytes", "dtype": "i4,O", "shape": [1], "entry": "0"}, ABC),
    "array of nothing": ({"$": "ndarray of bytes", "dtype": "|S0", "shape": [2**40], "entry": "0"}, ("U8", [0], b"")),
    "array of wide text": ({"$": "ndarray of bytes", "dtype": "<U999999999", "shape": [1], "entry": "0"}, ABC),
    "array of no character": (
        {"$": "ndarray of bytes", "dtype": "<U1", "shape": [1], "entry": "0"},
        ("U8", [4], b"\xff" * 4),
    ),
    "array of 65 axes": ({"$": "ndarray", "entry": "0"}, ("U8", [1] * 65, b"a")),
    "scalar of objects": ({"$": "numpy scalar", "dtype": "|O8", "bits": "00" * 8},),
    "scalar of two": ({"$": "numpy scalar", "dtype": "<f4", "bits": "00" * 8},),
    "scalar of a date": ({"$": "numpy scalar", "dtype": "<M8[zz]", "bits": "00" * 8},),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_structures_are_refused(name: str) -> None:
    with pytest.raises(CorruptCheckpoint):
        decode_tree(file_of(*MALFORMED[name]))


@pytest.mark.parametrize(
    ("node", "blob"), [({"$": "torch.dtype", "name": "float3"}, ()), ({"$": "tensor", "entry": "0"}, ("F4", [2], b"a"))]
)
def test_dtypes_that_torch_lacks_are_refused(node: Any, blob: Any) -> None:
    with pytest.raises(UnsupportedValue):
        decode_tree(file_of(node, *[blob] if blob else []))


def test_large_numbers_take_no_memory() -> None:
    far = {"$": "int", "hex": "f" * 100_000}
    found = decode_tree(
        file_of([{"$": "range", "start": 0, "stop": far, "step": 1}, {"$": "deque", "maxlen": 2**62, "items": []}])
    )
    assert found[0].stop == int("f" * 100_000, 16)
    assert found[1].maxlen == 2**62


class _Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_no_code_is_run(tmp_path: Path) -> None:
    data = pickle.dumps(_Bomb(tmp_path / "ran"))
    bomb = ("U8", [len(data)], data)
    for kind in ({"$": "pickle", "entry": "0"}, {"$": "tuple", "items": [{"$": "pickle", "entry": "0"}]}):
        with pytest.raises(UnsafeFile):
            decode_tree(file_of(kind, bomb))
    assert not (tmp_path / "ran").exists()
    decode_tree(file_of({"$": "pickle", "entry": "0"}, bomb), allow_pickle=True)
    assert (tmp_path / "ran").exists()


def test_a_file_without_structure_is_refused() -> None:
    with pytest.raises(CorruptCheckpoint, match="the entry 'structure' is missing"):
        decode_tree(encode_header([]))
    with pytest.raises(CorruptCheckpoint, match="the entry 'structure' is missing"):
        decode_tree(encode_header([HeaderEntry("structure", "I8", (2,), 0, 2)]) + b"{}")


def _nodes(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    tagged = [
        st.fixed_dictionaries({"$": st.just(kind), **dict.fromkeys(members, inner)})
        for kind, (members, _) in _DECODERS.items()
    ]
    record = st.fixed_dictionaries({"$": st.just("record"), "type": inner, "fields": inner})
    return st.one_of(
        *tagged, record, st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=2), inner, max_size=2)
    )


ATOMS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["0", "1", "uint8", "cpu", "PosixPath", "list", "<f4", "|u1", "<U1", "<M8[s]", "00" * 8, "61"])
    | st.text(max_size=3)
    | st.lists(st.integers(0, 4), max_size=3)
)


@settings(max_examples=300)
@given(st.recursive(ATOMS, _nodes, max_leaves=10))
def test_any_structure_is_a_value_or_an_error(structure: Any) -> None:
    with contextlib.suppress(CheckpointingException):
        decode_tree(file_of(structure, ABC, FOUR))
