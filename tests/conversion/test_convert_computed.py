"""Soups, averages and merges of adapters, converted: torch's bits, told apart from others, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from secrets import token_hex
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.checkpoint import OpenCheckpoint
from shardtree.conversion._journal import journal_of
from shardtree.conversion._plan import batches_of
from shardtree.core.lazy import _computed
from shardtree.storage import MemoryStorage

SHAPES = {"embedding": (40, 16), "layers.0.w": (16, 24), "norm": (16,)}


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {key: torch.randn(shape, generator=generator) for key, shape in SHAPES.items()}


def saved(tensors: Mapping[str, torch.Tensor], backend: str = "safetensors") -> MemoryStorage:
    folder = MemoryStorage()
    shards = {key: st.ShardedTensor.from_rank_offsets(key, data) for key, data in tensors.items()}
    st.save(shards, folder, (backend, 1))
    return folder


def over(f: Callable[..., Any], *others: OpenCheckpoint) -> Callable[[Any], Any]:
    """Return the transform that makes each tensor of itself and those of its name in other checkpoints."""

    def transform(tree: Mapping[str, st.ShardedTensor]) -> dict[str, st.ShardedTensor]:
        return {key: replace(each, data=f(each.data, *(one[key].data for one in others))) for key, each in tree.items()}

    return transform


ONE, TWO, THREE = weights(1), weights(2), weights(3)


def digest_of(f: Callable[..., Any], source: MemoryStorage, *others: MemoryStorage) -> str:
    opened = st.open_checkpoint(source)
    tree = over(f, *map(st.open_checkpoint, others))(dict(opened))
    batches = batches_of(list(tree.values()), [], None, 2**20)
    backends = ("safetensors", 1), ("safetensors", 1)
    where = (MemoryStorage(), opened.checkpoint, backends, batches, None)
    return journal_of(*where, common={}, nonce=token_hex(), allow_pickle=False).folder


def test_a_conversion_is_known_by_the_formula_and_by_the_other_checkpoints() -> None:
    source, other, third = (saved(each) for each in (ONE, TWO, THREE))
    formulas = [
        lambda a, b: a + b,
        lambda a, b: a - b,
        lambda a, b: b + a,
        lambda a, b: a + 2 * b,
        lambda a, b: a + 3 * b,
    ]
    found = [digest_of(f, source, other) for f in formulas]
    assert found == [digest_of(f, source, other) for f in formulas]
    assert len({*found, digest_of(formulas[0], source, third)}) == len(formulas) + 1
    assert digest_of(formulas[0], source, saved({**TWO, "norm": TWO["norm"] + 1})) not in found


def tells_factors_apart(text: Callable[..., str]) -> None:
    source = saved(ONE)
    factors = [torch.tensor(0.12345), torch.tensor(0.12346), torch.tensor(0.12345, dtype=torch.float64), 0.12345]
    assert len({text(lambda a, each=each: a * each, source) for each in factors}) == len(factors)


def test_a_conversion_is_known_by_every_digit_of_its_factors() -> None:
    tells_factors_apart(digest_of)


def test_the_law_of_factors_catches_numbers_as_torch_prints_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_computed, "scalar_text", repr)
    with pytest.raises(AssertionError):
        tells_factors_apart(digest_of)


def test_what_a_callers_function_makes_is_never_taken_for_what_another_made() -> None:
    source = saved(ONE)

    def mapped(data: Any) -> Any:
        return st.lazy_map(torch.square, data)

    assert digest_of(mapped, source) != digest_of(mapped, source)
