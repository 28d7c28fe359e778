"""The compiled sum is NumPy's, and is used where there is much to sum."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardtree.core.fingerprints import _sums, axis_weights, host_total
from shardtree.core.fingerprints._sums import SlabTotal, _slab_total, compiled_total
from shardtree.testing import shapes, tensors
from tests.core.trees.samples import assert_caught
from tests.quick_python.command import quick_python

BOXES = tensors(shapes().filter(len))
OFFSETS = st.integers(0, 200_000)


def check_slab(total: SlabTotal, tensor: torch.Tensor, first: int) -> None:
    size = min(8, tensor.itemsize)
    words = tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy().view(f"u{size}")
    words = words.reshape(*tensor.shape, -1) if words.size else words.reshape(0)
    weights = [axis_weights(axis, first, first + length) for axis, length in enumerate(words.shape)]
    assert total(words, weights) == _slab_total(words, weights)
    order = words.transpose()
    assert total(order, weights[::-1]) == _slab_total(words, weights)


@pytest.mark.slow
@given(BOXES, OFFSETS)
def test_it_makes_no_difference_who_sums(tensor: torch.Tensor, first: int) -> None:
    check_slab(compiled_total, tensor, first)


def test_the_law_catches_a_row_that_is_left_out() -> None:
    def without_a_row(words: Any, weights: Sequence[Any]) -> int:
        return compiled_total(words[1:], [weights[0][1:], *weights[1:]])

    assert_caught(check_slab, without_a_row, BOXES, OFFSETS)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return what sets how much it takes until compiling pays, in a process that has summed nothing."""
    monkeypatch.setattr(_sums, "_seen", [0])
    return lambda worth: monkeypatch.setattr(_sums, "_WORTH", worth)


def test_it_is_compiled_once_there_is_enough_to_sum(seen: Callable[[int], None]) -> None:
    seen(100)
    assert [_sums.compiled_for(40) for _ in range(3)] == [None, None, compiled_total]


@pytest.mark.parametrize("shape", [(70_001,), (3, 65_540), (300, 7, 130), (1 << 19, 2)])
@pytest.mark.parametrize("word", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_large_boxes_have_the_same_sum(seen: Callable[[int], None], shape: tuple[int, ...], word: Any) -> None:
    words = np.random.default_rng(0).integers(0, np.iinfo(word).max, shape, dtype=word)
    axes, offset = range(len(shape)), (65_000,) * len(shape)
    seen(1 << 60)
    by_numpy = host_total(words, axes, offset)
    seen(0)
    assert host_total(words, axes, offset) == by_numpy


WITHOUT_NUMBA = """
import sys
sys.modules["numba"] = None
import numpy as np
from shardtree.core.fingerprints import _sums, host_total
_sums._WORTH = 0
print(_sums.compiled_for(1), host_total(np.zeros(3, dtype=np.uint8), (0,), (0,)) > 0)
"""


@pytest.mark.slow
def test_numpy_sums_where_numba_is_missing() -> None:
    done = subprocess.run([*quick_python(), "-c", WITHOUT_NUMBA], capture_output=True, text=True, timeout=900)
    assert done.stdout.split() == ["None", "True"], done.stderr
