"""Objects loaded in another shape than they were saved in: by a rule, in every format; without one, an error."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

import shardtree as st
from shardtree.errors import IntegrityError, KeyMismatch, ShapeError, UnsafeFile
from shardtree.storage import MemoryStorage
from tests.core.trees.samples import assert_caught
from tests.options import load_keywords
from tests.shell.checkpoint import parts


def saved(count: int = 4, value: Any = lambda rank: [rank], **options: Any) -> MemoryStorage:
    cells = [st.ShardedObject("seen", value(rank), (count,), (rank,)) for rank in range(count)]
    return parts.saved({"seen": cells, "w": parts.whole("w", torch.ones(2))}, **options)


def asked(count: int, key: str = "seen") -> dict[str, Any]:
    return {"seen": [st.ShardedObject(key, "own", (count,), (cell,)) for cell in range(count)]}


def loaded(folder: Any, count: int, rule: Any = None, **options: Any) -> list[Any]:
    rules = None if rule is None else {"seen": rule}
    values: list[Any] = st.load(asked(count), folder, **load_keywords(object_rules=rules, **options))["seen"]
    return values


# Of the tensors, and of the objects where the first can't hold them.
FORMATS = [*((each, None) for each in parts.FORMATS), (("huggingface", 1), ("safetensors", 1))]


@pytest.mark.parametrize(("sharded", "common"), FORMATS, ids=lambda each: each and each[0])
def test_replicas_of_an_object_get_what_its_main_replica_gets_in_every_format(sharded: Any, common: Any) -> None:
    def on_rank(world: st.World) -> Any:
        item = st.ShardedObject("seen", None, (2,), (world.rank % 2,), world.rank // 2)
        return st.load(
            [item], folder, world=world, options=st.LoadOptions(object_rules={"seen": st.objects.redistribute_objects})
        )

    folder = saved(sharded_strategy=sharded, common_strategy=common)
    assert st.simulate(4, on_rank) == [[[0, 1]], [[2, 3]]] * 2


def test_a_rule_may_name_what_only_the_checkpoint_or_only_the_target_has() -> None:
    rules = {"seen": st.objects.redistribute_objects, "new": st.objects.drop_objects}
    target = {**asked(2), "new": st.ShardedObject("new", 1, (2,), (0,))}
    options = st.LoadOptions(object_rules=rules)
    found = st.load(target, saved(), validate_access_integrity=False, strict="ignore_all", options=options)
    assert found == {"seen": [[0, 1], [2, 3]]}
    weight = {"w": parts.whole("w", torch.zeros(2))}
    assert list(st.load(weight, saved(), options=st.LoadOptions(object_rules={"seen": rules["seen"]}))) == ["w"]


@pytest.mark.parametrize("strict", list(st.StrictHandling))
def test_strict_modes_count_an_array_as_stored_whatever_its_shape(strict: st.StrictHandling) -> None:
    target = {**asked(2), "w": parts.whole("w", torch.zeros(2))}
    options = st.LoadOptions(object_rules={"seen": st.objects.redistribute_objects})
    found = st.load(target, saved(), strict=strict, options=options)
    tree, *keys = found if isinstance(found, tuple) else (found,)
    assert tree["seen"] == [[0, 1], [2, 3]] and not any(keys)
    with pytest.raises(ShapeError, match="Name a rule"):
        st.load(target, saved(), strict=strict)


def test_what_a_rule_drops_is_not_read() -> None:
    folder = saved(value=lambda rank: print, allow_pickle=True)
    assert loaded(folder, 2, st.objects.drop_objects) == ["own", "own"]
    with pytest.raises(UnsafeFile):
        loaded(folder, 2, st.objects.replicate_cell((0,)))
    assert loaded(folder, 2, st.objects.replicate_cell((0,)), allow_pickle=True) == [print, print]


def test_cells_that_are_not_stored_are_named() -> None:
    folder = MemoryStorage()
    cells = [st.ShardedObject("seen", rank, (4,), (rank,)) for rank in (0, 2)]
    st.save(cells, folder, validate_access_integrity=False)
    with pytest.raises(IntegrityError, match=r"'seen', global shape \(4,\).*\n  \(1,\)\n  \(3,\)"):
        loaded(folder, 2, st.objects.replicate_objects)
    with pytest.raises(KeyMismatch, match="'seen/shard_1_4': not stored"):
        loaded(folder, 4)


def test_a_users_own_loading_of_tensors_leaves_objects_to_their_rules() -> None:
    own = st.get_default_strategy(st.StrategyAction.LOAD_SHARDED, "safetensors", 1)
    assert loaded(saved(), 2, st.objects.redistribute_objects, sharded_strategy=own) == [[0, 1], [2, 3]]
    with pytest.raises(ShapeError, match="Name a rule in object_rules"):
        loaded(saved(), 2, sharded_strategy=own)


def test_a_format_that_tells_nothing_takes_no_rules() -> None:
    strategies = {row: fn for row, fn in st.default_strategies.items() if row[0] is not st.StrategyAction.LOAD_METADATA}
    with pytest.raises(st.errors.StrategyError):
        loaded(saved(), 2, st.objects.drop_objects, strategies=strategies)


Objects = list[st.ShardedObject]
Load = Callable[[Objects, Objects, st.objects.ObjectRule], list[Any]]
SHAPES = some.one_of(some.lists(some.integers(1, 3), max_size=3).map(tuple), some.tuples(some.integers(9, 12)))
ANY_RULE = some.sampled_from(
    [
        st.objects.concatenate_objects,
        st.objects.redistribute_objects,
        st.objects.drop_objects,
        st.objects.fold_objects(max),
        st.objects.fold_objects(operator.add),
    ]
)


def a_load_gives_what_resharding_gives(load: Load, drawn: tuple[Any, Any, st.objects.ObjectRule]) -> None:
    shape, other, rule = drawn
    cells = [st.ShardedObject("seen", [n] * (n % 3), shape, at) for n, at in enumerate(np.ndindex(*shape))]
    targets = [st.ShardedObject("seen", "own", other, at) for at in np.ndindex(*other)]
    expected = [item.data for item in st.objects.reshard_objects(cells, targets, {"seen": rule})]
    assert load(cells, targets, rule) == expected


def saved_and_loaded(cells: Objects, targets: Objects, rule: st.objects.ObjectRule) -> list[Any]:
    folder = MemoryStorage()
    st.save(cells, folder)
    values: list[Any] = st.load(targets, folder, options=st.LoadOptions(object_rules={"*": rule}))
    return values


@pytest.mark.slow
@settings(max_examples=40)
@given(some.tuples(SHAPES, SHAPES, ANY_RULE))
def test_a_load_gives_what_resharding_in_memory_gives(drawn: tuple[Any, Any, st.objects.ObjectRule]) -> None:
    a_load_gives_what_resharding_gives(saved_and_loaded, drawn)


def test_the_law_catches_cells_in_the_order_of_their_names() -> None:
    def by_name(cells: Objects, targets: Objects, rule: st.objects.ObjectRule) -> list[Any]:
        values = tuple(item.data for item in sorted(cells, key=lambda item: item.unique_key))
        shape = targets[0].global_shape
        if cells[0].global_shape == shape:
            return [item.data for item in cells]
        found = rule(st.objects.ObjectArray("seen", cells[0].global_shape, values), shape)
        return ["own" if value is st.trees.HOLE else value for value in found]

    assert_caught(a_load_gives_what_resharding_gives, by_name, some.tuples(SHAPES, SHAPES, ANY_RULE))
