"""What a batch of a conversion costs doesn't grow with the number of all batches: counted, not timed."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch

import shardtree as st
from shardtree.conversion import _write, convert
from shardtree.formats.huggingface import _save as huggingface
from shardtree.formats.zarr import _layout as zarr
from shardtree.storage import MemoryStorage


def calls_of(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, backend: tuple[str, int], tensors: int) -> int:
    """Return how often a conversion of so many batches, one for each tensor, calls a function."""
    source = MemoryStorage()
    st.save([st.ShardedTensor.from_rank_offsets(f"v{number}", torch.zeros(8)) for number in range(tensors)], source)
    options: dict[str, Any] = {"leave_out": ["common"], "max_bytes_in_flight": 32, "verify": False}
    with monkeypatch.context() as patch:
        counted = Mock(wraps=getattr(module, name))
        patch.setattr(module, name, counted)
        assert convert(source, MemoryStorage(), backend=backend, **options).batches == tensors
    return counted.call_count


def test_each_batch_lays_out_its_own_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (calls_of(monkeypatch, zarr, "_array_layout", ("zarr", 3), tensors) for tensors in (10, 40))
    assert 0 < many <= 4 * few


def test_the_files_of_a_model_are_laid_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (calls_of(monkeypatch, huggingface, "model_files", ("huggingface", 1), tensors) for tensors in (5, 50))
    assert 0 < many == few, "each batch lays out the whole model"


def test_the_count_catches_batches_that_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = _write.Batches.prepare

    def anew(batches: _write.Batches, number: int) -> Any:
        batches.state = {}
        return prepare(batches, number)

    monkeypatch.setattr(_write.Batches, "prepare", anew)
    with pytest.raises(AssertionError, match="each batch lays out the whole model"):
        test_the_files_of_a_model_are_laid_out_once(monkeypatch)
