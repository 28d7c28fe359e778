"""What a batch of a conversion costs doesn't grow with the number of all batches: counted, not timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.checkpoint.conversion import _write, convert
from shardtree.storage import MemoryStorage
from shardtree.strategies.huggingface import _save as huggingface
from shardtree.strategies.zarr import _layout as zarr


class Counted:
    """A function that counts its calls."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn, self.calls = fn, 0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.calls += 1
        return self.fn(*arguments, **options)


def calls_of(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, backend: tuple[str, int], tensors: int) -> int:
    """Return how often a conversion of so many batches, one for each tensor, calls a function."""
    source = MemoryStorage()
    st.save([st.ShardedTensor.from_rank_offsets(f"v{number}", torch.zeros(8)) for number in range(tensors)], source)
    options: dict[str, Any] = {"leave_out": ["common"], "max_bytes_in_flight": 32, "verify": False}
    with monkeypatch.context() as patch:
        counted = Counted(getattr(module, name))
        patch.setattr(module, name, counted)
        assert convert(source, MemoryStorage(), backend=backend, **options).batches == tensors
    return counted.calls


def check_linear(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, backend: tuple[str, int]) -> None:
    few, many = (calls_of(monkeypatch, module, name, backend, tensors) for tensors in (10, 40))
    assert 0 < many <= 4 * few, f"{name} is called {few} times for 10 tensors, {many} times for 40"


CASES = [(huggingface, "model_files", ("huggingface", 1)), (zarr, "_array_layout", ("zarr", 3))]


@pytest.mark.parametrize(("module", "name", "backend"), CASES)
def test_each_batch_lays_out_its_own_tensors(
    module: Any, name: str, backend: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_linear(monkeypatch, module, name, backend)


def test_the_files_of_a_model_are_laid_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {calls_of(monkeypatch, huggingface, "model_files", ("huggingface", 1), tensors) for tensors in (5, 50)}
    assert len(counts) == 1, "each batch lays out the whole model"


def test_the_count_catches_batches_that_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = _write.Batches.prepare

    def anew(batches: _write.Batches, number: int) -> Any:
        batches.state = {}
        return prepare(batches, number)

    monkeypatch.setattr(_write.Batches, "prepare", anew)
    with pytest.raises(AssertionError, match="each batch lays out the whole model"):
        test_the_files_of_a_model_are_laid_out_once(monkeypatch)
