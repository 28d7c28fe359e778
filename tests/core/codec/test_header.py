"""Headers of safetensors files: ours, the package's, and hostile ones."""

from __future__ import annotations

import contextlib
import json

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardtree.core.codec import (
    HeaderEntry,
    bit_view,
    decode_header,
    decode_header_and_metadata,
    dtype_from_tag,
    encode_header,
    format_tag,
    header_length,
)
from shardtree.core.codec._header import byte_length
from shardtree.errors import CheckpointingException, CorruptCheckpoint, MetadataError

TAGS = ["BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F16", "BF16", "F32", "F64", "C64"]
TAGS += ["F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"]
NAMES = st.text(st.characters(exclude_categories=["Cs"])).filter(lambda name: name != "__metadata__")


SPECS = st.dictionaries(NAMES, st.tuples(st.sampled_from(TAGS), st.lists(st.integers(0, 3), max_size=3)), max_size=5)


def placed(specs: dict[str, tuple[str, list[int]]]) -> list[HeaderEntry]:
    """Entries of these names, tags and shapes, one behind the other."""
    entries, start = [], 0
    for name, (tag, shape) in specs.items():
        stop = start + byte_length(tag, shape)
        entries.append(HeaderEntry(name, tag, tuple(shape), start, stop))
        start = stop
    return entries


@given(SPECS, st.dictionaries(NAMES, NAMES, max_size=2))
def test_decode_undoes_encode(specs: dict[str, tuple[str, list[int]]], metadata: dict[str, str]) -> None:
    entries = placed(specs)
    header = encode_header(entries, metadata)
    length = len(header) + max((entry.stop for entry in entries), default=0)
    decoded, start = decode_header(header, length)
    in_place = sorted(entries, key=lambda entry: (entry.start, entry.stop))
    assert sorted(decoded, key=str) == sorted(in_place, key=str)
    assert [entry.start for entry in decoded] == [entry.start for entry in in_place]
    assert start == len(header) == 8 + header_length(header, len(header)) and start % 64 == 0
    assert decode_header_and_metadata(header, length)[2] == metadata


@pytest.mark.peers
@given(SPECS, st.dictionaries(NAMES, NAMES, max_size=2))
def test_the_safetensors_package_reads_what_we_write(
    specs: dict[str, tuple[str, list[int]]], metadata: dict[str, str]
) -> None:
    entries = placed(specs)
    length = sum(entry.stop - entry.start for entry in entries)
    found = safetensors.deserialize(encode_header(entries, metadata) + bytes(length))
    assert {name: (spec["dtype"], tuple(spec["shape"]), len(spec["data"])) for name, spec in found} == {
        entry.name: (entry.tag, entry.shape, entry.stop - entry.start) for entry in entries
    }


@pytest.mark.peers
@given(st.dictionaries(NAMES, st.sampled_from(TAGS), max_size=5))
def test_we_read_what_the_safetensors_package_writes(tags: dict[str, str]) -> None:
    dtypes = {name: dtype_from_tag(tag) for name, tag in tags.items() if tag in TAGS[:18]}
    tensors = {name: torch.arange(6, dtype=torch.uint8).repeat(8).view(dtype) for name, dtype in dtypes.items()}
    file = safetensors.torch.save(tensors, metadata={"format": "pt"})
    entries, start = decode_header(file, len(file))
    assert decode_header_and_metadata(file, len(file))[2] == {"format": "pt"}
    assert {entry.name for entry in entries} == set(tensors)
    for entry in entries:
        tensor = tensors[entry.name]
        assert (entry.tag, entry.shape) == (format_tag(tensor.dtype), tuple(tensor.shape))
        assert file[start + entry.start : start + entry.stop] == bytes(bit_view(tensor).tolist())


def of_text(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


def of_spec(spec: object) -> bytes:
    return of_text(json.dumps({"w": spec}).encode())


def of_shape(tag: object, shape: object, offsets: object = (0, 4)) -> bytes:
    return of_spec({"dtype": tag, "shape": shape, "data_offsets": offsets})


HOSTILE = {
    "empty": (b"", "too short"),
    "seven bytes": (b"1234567", "too short"),
    "length of 0": (bytes(8), "does not fit"),
    "longer than the file": ((100).to_bytes(8, "little") + b"{}", "does not fit"),
    "longer than memory": (b"\xff" * 8 + b"{}", "does not fit"),
    "not UTF-8": (of_text(b'{"\xff":1}'), "not valid JSON"),
    "not JSON": (of_text(b"{]"), "not valid JSON"),
    "not an object": (of_text(b"[]"), "not a JSON object"),
    "leading space": (of_text(b" {}"), "not a JSON object"),
    "byte order mark": (of_text(b"\xef\xbb\xbf{}"), "not valid JSON"),
    "deep": (of_text(b'{"a":' * 100_000), "nested too deep"),
    "name twice": (of_text(b'{"a":{},"a":{}}'), "name occurs twice"),
    "lone surrogate": (of_text(rb'{"\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'), "surrogates"),
    "long number": (of_text(b'{"a":' + b"9" * 100_000 + b"}"), "not valid JSON"),
    "NaN": (of_text(b'{"a":NaN}'), "not valid JSON"),
    "large float": (of_text(b'{"a":1e999}'), "out of range"),
    "spec is a list": (of_spec([1, 2, 3]), "entry 'w'"),
    "spec is null": (of_spec(None), "entry 'w'"),
    "member missing": (of_spec({"dtype": "U8", "shape": [4]}), "data_offsets"),
    "member too many": (of_spec({"dtype": "U8", "shape": [4], "data_offsets": [0, 4], "x": 1}), "and nothing else"),
    "tag unknown": (of_shape("F128", [4]), "unknown dtype 'F128'"),
    "tag unhashable": (of_shape(["U8"], [4]), "entry 'w'"),
    "shape is a string": (of_shape("U8", "1111"), "entry 'w'"),
    "shape negative": (of_shape("U8", [-2, -2]), "too large or not an integer"),
    "shape of floats": (of_shape("U8", [4.0]), "too large or not an integer"),
    "shape of bools": (of_shape("F32", [True]), "too large or not an integer"),
    "shape overflows": (of_shape("U8", [2**62, 2**62, 4]), "64 bits"),
    "shape overflows beside 0": (of_shape("U8", [0, 2**62, 2**62], [0, 0]), "64 bits"),
    "shape of many large lengths": (of_shape("U8", [2**62] * 100_000), "64 bits"),
    "length over 64 bits": (of_shape("U8", [2**64]), "too large or not an integer"),
    "half a byte": (of_shape("F4", [7]), "fill whole bytes"),
    "bytes are not the shape's": (of_shape("F32", [2]), "but the shape takes"),
    "offsets reversed": (of_shape("U8", [4], [4, 0]), "but the shape takes"),
    "offsets negative": (of_shape("U8", [4], [-4, 0]), "too large or not an integer"),
    "offsets of bools": (of_shape("U8", [1], [False, True]), "too large or not an integer"),
    "three offsets": (of_shape("U8", [4], [0, 4, 8]), "entry 'w'"),
    "gap before": (of_shape("U8", [4], [4, 8]), "gap"),
    "longer than the data": (of_shape("U8", [8], [0, 8]), "do not end where the file does"),
    "shorter than the data": (of_shape("U8", [2], [0, 2]), "do not end where the file does"),
    "metadata of numbers": (of_text(b'{"__metadata__":{"a":1}}'), "strings to strings"),
    "metadata is a list": (of_text(b'{"__metadata__":[]}'), "strings to strings"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_refused(name: str) -> None:
    header, reason = HOSTILE[name]
    file = header + bytes(4) if len(header) > 8 and "longer than the file" not in name else header
    with pytest.raises(CorruptCheckpoint, match=reason):
        decode_header(file, len(file))


def test_a_cut_header_is_refused() -> None:
    header = encode_header([HeaderEntry("w", "U8", (4,), 0, 4)])
    with pytest.raises(CorruptCheckpoint, match="cut off"):
        decode_header(header[:-1], len(header) + 4)


@given(st.binary(max_size=200), st.integers(0, 300))
def test_any_bytes_are_a_header_or_an_error(text: bytes, file_length: int) -> None:
    for data in (text, of_text(text)):
        with contextlib.suppress(CheckpointingException):
            decode_header(data, file_length)


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ([HeaderEntry("w", "U8", (4,), 4, 8)], "gap"),
        ([HeaderEntry("w", "F32", (4,), 0, 4)], "is not as long as its shape requires"),
        ([HeaderEntry("w", "U8", (1,), 0, 1), HeaderEntry("w", "U8", (1,), 1, 2)], "same name"),
        ([HeaderEntry("__metadata__", "U8", (1,), 0, 1)], "same name"),
        ([HeaderEntry("w\ud800", "U8", (1,), 0, 1)], "surrogates"),
        ([HeaderEntry("w", "F31", (1,), 0, 4)], "unknown dtype"),
    ],
)
def test_encode_refuses_what_decode_would(entries: list[HeaderEntry], reason: str) -> None:
    with pytest.raises(MetadataError, match=reason):
        encode_header(entries)
