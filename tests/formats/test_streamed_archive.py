"""Archives that are written as streams are what torch.save would have written, for any values and tensors."""

from __future__ import annotations

import io
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from shardtree.errors import UnsupportedValue
from shardtree.formats.archives import StreamedTensor, archive_records, decode_archive, streamed_archive

DTYPES = [torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]


def in_parts(tensor: torch.Tensor) -> StreamedTensor:
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    pieces = [memoryview(data[at : at + 3]) for at in range(0, len(data), 3)]
    return StreamedTensor(tensor.dtype, tuple(tensor.shape), lambda: iter(pieces))


def written(value: Any) -> bytes:
    return b"".join(streamed_archive(value))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3), (1,), (0, 4)])
def test_tensors_in_any_value_come_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(6).to(dtype)[: torch.Size(shape).numel()].view(shape)
    value = {"module": OrderedDict(w=in_parts(tensor)), "shapes": [torch.Size(shape)], "small": tensor, "lr": 0.5}
    data = written(value)
    for loaded in (torch.load(io.BytesIO(data), weights_only=True), decode_archive(data, what="test")):
        for found in (loaded["module"]["w"], loaded["small"]):
            assert found.dtype == dtype and found.shape == shape
            assert torch.equal(found.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))
        assert loaded["shapes"] == [torch.Size(shape)] and loaded["lr"] == 0.5


def test_each_record_has_its_checksum() -> None:
    data = written([in_parts(torch.ones(5))])
    records = archive_records(lambda begin, end: data[begin:end], len(data), what="test")
    plain = io.BytesIO()
    torch.save([torch.ones(5)], plain)
    theirs = archive_records(lambda b, e: plain.getvalue()[b:e], len(plain.getvalue()), what="test")
    assert [one.crc32 for one in records if "data/0" in one.name] == [
        one.crc32 for one in theirs if "data/0" in one.name
    ]


def test_a_tensor_with_fewer_bytes_than_it_should_have_is_refused() -> None:
    short = StreamedTensor(torch.float32, (2,), lambda: iter([memoryview(bytes(4))]))
    with pytest.raises(UnsupportedValue, match="found 4 bytes, expected 8 bytes"):
        written(short)


@dataclass
class Point:
    x: int


def test_an_instance_of_a_class_is_refused_at_once() -> None:
    with pytest.raises(UnsupportedValue, match="Point"):
        streamed_archive([Point(1)])
