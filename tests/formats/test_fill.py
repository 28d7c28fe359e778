"""Reading a stored tensor by its strides: what is read at a time, and how much in all."""

from __future__ import annotations

from math import prod

import pytest
import torch

from shardtree.errors import CorruptCheckpoint
from shardtree.formats.archives import Record, StoredTensor, box_of, fill_tensor, filled_tensor, reach, strips

COUNT = 2**21


def stored(shape: tuple[int, ...], stride: tuple[int, ...], nbytes: int = 4 * COUNT) -> StoredTensor:
    return StoredTensor("a.pt", torch.float32, shape, stride, 0, Record("data/0", 0, nbytes, 0))


def reads_of(tensor: StoredTensor) -> list[int]:
    """Return the lengths of the reads that fill a tensor, whose elements are the numbers of their place."""
    numbers, lengths = torch.arange(COUNT, dtype=torch.float32), list[int]()
    data = memoryview(numbers.numpy()).cast("B")

    def read(begin: int, end: int) -> memoryview:
        lengths.append(end - begin)
        return data[begin:end]

    out = torch.empty(tensor.shape)
    fill_tensor(read, tensor, out, "example")
    assert torch.equal(out, numbers.as_strided(tensor.shape, tensor.stride, tensor.begin // 4))
    return lengths


TRANSPOSED = stored((1024, 2048), (1, 1024))


@pytest.mark.parametrize(
    ("tensor", "most_reads", "most_bytes"),
    [
        (TRANSPOSED, 4, 4 * COUNT),
        (box_of(TRANSPOSED, ((0, 512), (1024, 64))), 1, 4 * 1024 * 64),  # columns: consecutive bytes
        (box_of(TRANSPOSED, ((256, 0), (512, 2048))), 8, 4 * COUNT),  # half of all rows: half of each column
        (box_of(TRANSPOSED, ((7, 0), (1, 2048))), 130, 4 * COUNT),  # one row
        (stored((64, 8), (32768, 1)), 64, 64 * 8 * 4),  # far apart: nothing between is read
        (stored((512, 2048), (0, 1)), 1, 4 * 2048),
        (stored((1000, 1000), (1, 1)), 1, 4 * 2000),
        (stored((0, 5), (5, 1)), 0, 0),
        (stored((), ()), 1, 4),
    ],
)
def test_reads_are_few_and_have_little_else(tensor: StoredTensor, most_reads: int, most_bytes: int) -> None:
    lengths = reads_of(tensor)
    assert len(lengths) <= most_reads and sum(lengths) <= most_bytes
    assert max(lengths, default=0) <= 4 * 1024 * 1024


def test_strips_tile_a_tensor() -> None:
    boxes = list(strips(stored((256, 64, 128), (64, 1, 64 * 256)), "example"))
    assert sum(prod(shape) for _, shape in boxes) == 256 * 64 * 128 and len(set(boxes)) == len(boxes) > 1


def test_overlapping_elements_that_span_much_are_refused() -> None:
    far = stored((2**14, 2**14), (2**20, 2**20), nbytes=2**50)
    with pytest.raises(
        CorruptCheckpoint,
        match=f"example: a tensor with overlapping elements spans too many bytes\n  found {reach(far)} b",
    ):
        filled_tensor(lambda begin, end: pytest.fail("it was read"), far, "example")


def test_bytes_that_are_not_there_are_an_error() -> None:
    with pytest.raises(CorruptCheckpoint, match="example: bytes of a tensor are missing"):
        filled_tensor(lambda begin, end: b"", TRANSPOSED, "example")
