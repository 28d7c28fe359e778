"""Patterns of specs that fit no tensor: an error where the whole tree is known, and for a near miss where it isn't."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from shardtree.core.trees import match_key
from shardtree.errors import KeyMismatch, MetadataError
from shardtree.layouts import Mesh, PartitionSpec, abstract_at, from_local, layout_of, shard, shard_at, specs_by_pattern
from shardtree.trees import nested
from tests.core.trees.samples import assert_caught

MESH, ROWS, WHOLE = Mesh(tp=2), PartitionSpec("tp"), PartitionSpec()
KEYS = [f"layers.{layer}.{name}" for layer in range(3) for name in ("up.weight", "norm.weight")] + ["embed.weight"]
TREE = nested({key: torch.zeros(4, 4) for key in KEYS})
TYPOS = ["**.uup.weight", "layer.*.up.weight", "layers.*.up.weigth", "layers.*.pu.weight.bias", "emebd.weight"]
PATTERNS = [*KEYS, *TYPOS, "**", "**.up.weight", "layers.**", "layers.*.*.weight", "head.weight", "layers.7.up.weight"]
WHOLE_TREES: list[Callable[[Any], Any]] = [
    lambda specs: shard(TREE, MESH, specs),
    lambda specs: shard_at(TREE, MESH, specs, 1),
    lambda specs: abstract_at(TREE, MESH, specs, 1),
    lambda specs: layout_of(TREE, MESH, specs),
]


def each_pattern_is_used_or_named(cut: Callable[[Any], Any], patterns: list[str]) -> None:
    firsts = [next((p for p in patterns if match_key(p, key) is not None), None) for key in KEYS]
    unused = [pattern for pattern in patterns if pattern not in firsts]
    try:
        cut(specs_by_pattern(dict.fromkeys(patterns, ROWS), default=WHOLE))
    except KeyMismatch as error:
        assert unused and all(repr(pattern) in str(error) for pattern in unused)
    else:
        assert not unused


LISTS = some.lists(some.sampled_from(PATTERNS), unique=True, max_size=4)


@given(some.sampled_from(WHOLE_TREES), LISTS)
def test_a_pattern_that_is_no_key_s_first_one_is_named(cut: Callable[[Any], Any], patterns: list[str]) -> None:
    each_pattern_is_used_or_named(cut, patterns)


def test_the_law_of_patterns_catches_typing_errors_that_fall_to_the_default() -> None:
    assert_caught(each_pattern_is_used_or_named, lambda specs: [specs(key, None) for key in KEYS], LISTS)


@pytest.mark.parametrize("pattern", [*TYPOS[:3], TYPOS[4], "layers.*.noorm.weight", "layers.*.nrom.weight"])
def test_a_rank_s_own_tensors_show_a_near_miss(pattern: str) -> None:
    with pytest.raises(KeyMismatch, match=r"from_local: patterns of specs match no tensor\n  '.*', nearly '"):
        from_local(TREE, MESH, specs_by_pattern({pattern: ROWS}, default=WHOLE), 0)
    from_local(TREE, MESH, specs_by_pattern({pattern: ROWS}, default=WHOLE, unused="allow"), 0)


@pytest.mark.parametrize(
    "pattern",
    ["head.weight", "layers.7.up.weight", "final.norm.weight", "layers.*.down.weight", "layers.*.attention.qkv.weight"],
)
def test_a_stage_may_lack_what_a_pattern_names(pattern: str) -> None:
    from_local(TREE, MESH, specs_by_pattern({pattern: ROWS}, default=WHOLE), 0)


def test_a_key_with_a_pattern_of_its_own_is_no_near_miss() -> None:
    specs = specs_by_pattern({"layers.*.ups.weight": ROWS, "layers.*.up.weight": WHOLE}, default=WHOLE)
    from_local(TREE, MESH, specs, 0)


def test_specs_are_shared_by_models_on_request() -> None:
    specs = specs_by_pattern({"**.up.weight": ROWS, "**.experts.*": WHOLE}, default=WHOLE, unused="allow")
    assert shard_at(TREE, MESH, specs, 1)["layers"]["0"]["up"]["weight"].global_offset == (2, 0)
    with pytest.raises(MetadataError, match="invalid value of unused"):
        specs_by_pattern({}, unused="ignore")  # type: ignore[arg-type]
