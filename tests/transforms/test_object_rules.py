"""Arrays of objects in another shape: what each rule keeps, and that nothing is shared with what was given."""

from __future__ import annotations

import operator
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import chain
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

import shardtree as st
from shardtree.errors import IntegrityError
from tests.core.trees.samples import assert_caught

Rule = st.objects.ObjectRule
Reshard = Callable[..., list[st.ShardedObject]]
Reshaping = tuple[st.objects.ObjectArray, Any]

SHAPES = some.lists(some.integers(1, 3), max_size=3).map(tuple)
ROWS: dict[str, Callable[[Sequence[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "str": lambda numbers: "".join(map(chr, numbers)),
    "bytes": bytes,
    "tensor": lambda numbers: torch.tensor(numbers, dtype=torch.int64).view(-1, 1).repeat(1, 2),
    "float8": lambda numbers: torch.tensor(numbers, dtype=torch.uint8).view(torch.float8_e4m3fn),
    "array": lambda numbers: np.array(numbers, dtype=np.int16),
}


def numbers_of(value: Any) -> list[int]:
    """Return the numbers that a value of ROWS was made of."""
    if isinstance(value, str):
        return list(map(ord, value))
    if isinstance(value, torch.Tensor):
        value = value.view(torch.uint8).tolist() if value.itemsize == 1 else value[:, 0].tolist()
    return [int(number) for number in value]


@some.composite
def arrays(draw: some.DrawFn) -> Reshaping:
    """Return an array whose values can be joined, and another shape."""
    shape, other = draw(SHAPES), draw(SHAPES)
    parts = draw(some.lists(some.lists(some.integers(0, 120), max_size=5), min_size=prod(shape), max_size=prod(shape)))
    kind = draw(some.sampled_from(sorted(ROWS)))
    return st.objects.ObjectArray("seen", shape, tuple(map(ROWS[kind], parts))), other


def sharded(array: st.objects.ObjectArray) -> list[st.ShardedObject]:
    cells = zip(array.cells, array.values, strict=True)
    return [st.ShardedObject(array.key, value, array.shape, cell) for cell, value in cells]


def asked(key: str, shape: tuple[int, ...]) -> list[st.ShardedObject]:
    return [st.ShardedObject(key, None, shape, cell) for cell in np.ndindex(*shape)]


def same(left: Any, right: Any) -> bool:
    return not st.diff(left, right)


def everything_is_dealt_out_in_order(rule: Rule, drawn: Reshaping) -> None:
    array, shape = drawn
    found = rule(array, shape)
    assert {type(value) for value in found} == {type(array.values[0])}
    dealt = [numbers_of(value) for value in found]
    assert list(chain.from_iterable(dealt)) == [number for value in array.values for number in numbers_of(value)]
    assert sorted(map(len, dealt), reverse=True) == list(map(len, dealt))
    assert len(dealt[0]) - len(dealt[-1]) <= 1


@given(arrays())
def test_redistributing_deals_everything_out_in_order(drawn: Reshaping) -> None:
    everything_is_dealt_out_in_order(st.objects.redistribute_objects, drawn)


def equal_parts_only(array: st.objects.ObjectArray, shape: Any) -> list[Any]:
    joined, count = st.objects.concatenate_objects(array, ())[0], prod(shape)
    each = len(joined) // count
    return [joined[place * each : (place + 1) * each] for place in range(count)]


def test_the_law_of_dealing_catches_equal_parts_that_leave_a_rest() -> None:
    assert_caught(everything_is_dealt_out_in_order, equal_parts_only, arrays())


Fold = Callable[[Callable[[Any, Any], Any]], Rule]


def everybody_gets_the_sum(fold: Fold, drawn: tuple[Any, Any]) -> None:
    shape, other = drawn
    values = tuple(3**place for place in range(prod(shape)))
    assert list(fold(operator.add)(st.objects.ObjectArray("consumed", shape, values), other)) == [sum(values)] * prod(
        other
    )


@given(some.tuples(SHAPES, SHAPES))
def test_folding_with_plus_gives_everybody_the_sum(drawn: tuple[Any, Any]) -> None:
    everybody_gets_the_sum(st.objects.fold_objects, drawn)


def test_the_law_of_sums_catches_a_fold_that_forgets() -> None:
    def forgetting(function: Any) -> Rule:
        return lambda array, shape: st.objects.fold_objects(function)(replace(array, values=array.values[:2]), shape)

    assert_caught(everybody_gets_the_sum, forgetting, some.tuples(SHAPES, SHAPES))


def the_same_shape_is_identity(reshard: Reshard, drawn: Reshaping) -> None:
    array, _ = drawn
    objects = sharded(array)
    found = reshard(objects[::-1], [item.without_data() for item in objects], {"seen": st.objects.concatenate_objects})
    assert same([item.data for item in found], list(array.values))
    assert [(item.key, item.global_offset) for item in found] == [(item.key, item.global_offset) for item in objects]


@given(arrays())
def test_the_same_shape_is_identity_whatever_the_rule(drawn: Reshaping) -> None:
    the_same_shape_is_identity(st.objects.reshard_objects, drawn)


def in_the_order_given(sources: Any, targets: Any, rules: Any) -> list[st.ShardedObject]:
    return [replace(item, data=source.data) for item, source in zip(targets, sources, strict=True)]


def test_the_law_of_the_same_shape_catches_values_in_the_order_given() -> None:
    assert_caught(the_same_shape_is_identity, in_the_order_given, arrays())


VALUES = some.recursive(
    some.builds(lambda number: torch.full((4,), number)[1:3], some.integers(0, 9))
    | some.builds(lambda number: np.full(2, number), some.integers(0, 9))
    | some.builds(bytearray, some.binary(max_size=2))
    | some.sets(some.integers(0, 3))
    | some.integers(),
    lambda inner: some.lists(inner, max_size=2) | some.dictionaries(some.sampled_from("ab"), inner, max_size=2),
    max_leaves=4,
)


def changeable(value: Any) -> Iterator[Any]:
    """Yield every container, tensor and array in a value; of a tensor its memory."""
    if isinstance(value, (list, dict)):
        yield id(value)
        for child in value.values() if isinstance(value, dict) else value:
            yield from changeable(child)
    elif isinstance(value, torch.Tensor):
        yield value.untyped_storage().data_ptr()
    elif isinstance(value, (np.ndarray, bytearray, set)):
        yield id(value)


def nothing_is_shared(reshard: Reshard, drawn: tuple[Any, int]) -> None:
    value, count = drawn
    before = deepcopy(value)
    sources = [st.ShardedObject("state", value, (2,), (place,)) for place in range(2)]
    targets = [*asked("state", (3,)), *asked("state", (2,))][:count]
    found = reshard(sources, targets, {"state": st.objects.replicate_cell((1,))})
    assert all(same(item.data, before) for item in found) and same(value, before)
    held = [set(changeable(one)) for one in (value, *(item.data for item in found))]
    assert sum(map(len, held)) == len(set().union(*held))


@given(some.tuples(VALUES, some.integers(1, 5)))
def test_targets_share_nothing_that_can_change(drawn: tuple[Any, int]) -> None:
    nothing_is_shared(st.objects.reshard_objects, drawn)


def test_the_law_of_sharing_catches_one_value_for_all_targets() -> None:
    def shared(sources: Any, targets: Any, rules: Any) -> list[st.ShardedObject]:
        value = deepcopy(sources[1].data)
        return [replace(item, data=value) for item in targets]

    assert_caught(nothing_is_shared, shared, some.tuples(VALUES, some.integers(1, 5)))


def without_a_rule_it_is_an_error(reshard: Reshard, drawn: tuple[Any, Any]) -> None:
    shape, other = drawn
    array = st.objects.ObjectArray("seen", shape, tuple(range(prod(shape))))
    try:
        found = reshard(sharded(array), asked("seen", other))
    except IntegrityError as error:
        assert all(text in str(error) for text in ("'seen'", str(shape), str(other), "redistribute_objects"))
    else:
        assert shape == other and [item.data for item in found] == list(array.values)


@given(some.tuples(SHAPES, SHAPES))
def test_another_shape_without_a_rule_is_an_error(drawn: tuple[Any, Any]) -> None:
    without_a_rule_it_is_an_error(st.objects.reshard_objects, drawn)


def test_the_law_of_rules_catches_cells_that_happen_to_be_there() -> None:
    def by_cell(sources: Any, targets: Any) -> list[st.ShardedObject]:
        known = {item.global_offset: item.data for item in sources}
        if {item.global_offset for item in targets} <= known.keys():
            return [replace(item, data=known[item.global_offset]) for item in targets]
        return st.objects.reshard_objects(sources, targets)

    assert_caught(without_a_rule_it_is_an_error, by_cell, some.tuples(SHAPES, SHAPES))


def reshaped(values: Sequence[Any], count: int, rule: Rule) -> list[Any]:
    array = st.objects.ObjectArray("state", (len(values),), tuple(values))
    return [item.data for item in st.objects.reshard_objects(sharded(array), asked("state", (count,)), {"**": rule})]


def test_replicate_takes_values_that_are_equal_to_the_last_bit() -> None:
    states = [{"rng": torch.arange(3), "seed": 7} for _ in range(2)]
    assert same(reshaped(states, 3, st.objects.replicate_objects), [states[0]] * 3)
    with pytest.raises(IntegrityError, match=r"'state' at \(1,\): value\['lr'\] is -0.0, not 0.0"):
        reshaped([{"lr": 0.0}, {"lr": -0.0}], 1, st.objects.replicate_objects)


def test_targets_keep_what_they_hold_where_sources_are_dropped() -> None:
    own = [{"seed": place} for place in range(3)]
    targets = [st.ShardedObject("rng", state, (3,), (place,)) for place, state in enumerate(own)]
    found = st.objects.reshard_objects(
        [st.ShardedObject("rng", 1, (1,), (0,))], targets, {"rng": st.objects.drop_objects}
    )
    assert [item.data for item in found] == own
    assert found[0] is targets[0]


def test_fold_may_change_its_first_argument() -> None:
    lists = [[1], [2], [3]]
    assert reshaped(lists, 1, st.objects.fold_objects(operator.iadd)) == [[1, 2, 3]]
    assert lists == [[1], [2], [3]]


def test_each_field_has_a_rule_and_keeps_the_dicts_kind_and_order() -> None:
    rule = st.objects.rules_by_field(
        {
            "epoch": st.objects.replicate_objects,
            "consumed": st.objects.fold_objects(operator.add),
            "worker": st.objects.drop_objects,
            "shuffle": st.objects.rules_by_field({"buffer": st.objects.redistribute_objects}),
        }
    )
    states = [
        OrderedDict(shuffle=defaultdict(list, buffer=[place, place + 10]), consumed=place + 5, worker=place, epoch=2)
        for place in range(3)
    ]
    found = reshaped(states, 2, rule)
    assert found == [
        {"shuffle": {"buffer": [0, 10, 1]}, "consumed": 18, "epoch": 2},
        {"shuffle": {"buffer": [11, 2, 12]}, "consumed": 18, "epoch": 2},
    ]
    assert list(found[0]) == ["shuffle", "consumed", "epoch"]
    assert type(found[0]) is OrderedDict and found[0]["shuffle"]["new"] == []


def test_a_rule_may_be_any_function_that_knows_both_shapes() -> None:
    def by_columns(array: st.objects.ObjectArray, shape: tuple[int, ...]) -> Sequence[Any]:
        cells = np.array(array.values, dtype=object).reshape(array.shape)
        return list(np.repeat(cells, shape[0] // array.shape[0], axis=0).flat)

    array = st.objects.ObjectArray("rng", (1, 2), ("a", "b"))
    found = st.objects.reshard_objects(sharded(array), asked("rng", (2, 2)), {"rng": by_columns})
    assert [item.data for item in found] == ["a", "b", "a", "b"]


def test_main_replicas_count_and_all_replicas_of_a_target_are_filled() -> None:
    cells = [(place, replica) for place in (0, 1) for replica in (1, 0)]
    sources = [st.ShardedObject("n", "copy" if replica else place, (2,), (place,), replica) for place, replica in cells]
    targets = [st.ShardedObject("n", None, (1,), (0,), replica) for replica in range(3)]
    found = st.objects.reshard_objects(sources, targets, {"n": st.objects.fold_objects(operator.add)})
    assert [item.data for item in found] == [1, 1, 1]
    assert [item.replica_id for item in found] == [0, 1, 2]


def test_a_last_size_that_is_not_known_ends_with_the_last_object() -> None:
    sources = [st.ShardedObject("rng", place, (2, -1), (place % 2, place // 2)) for place in range(6)]
    (same_shape,) = st.objects.reshard_objects(sources, [st.ShardedObject("rng", None, (2, 3), (1, 2))])
    (as_given,) = st.objects.reshard_objects(sources, [st.ShardedObject("rng", None, (2, -1), (1, 2))])
    assert (same_shape.data, as_given.data) == (5, 5)
    (folded,) = st.objects.reshard_objects(sources, asked("rng", ()), {"rng": st.objects.fold_objects(max)})
    assert folded.data == 5
    with pytest.raises(IntegrityError, match=r"of shape \(2, 3\), asked for in shape \(4, -1\)"):
        st.objects.reshard_objects(
            sources, [st.ShardedObject("rng", None, (4, -1), (0, 0))], {"rng": st.objects.replicate_objects}
        )


def test_an_error_of_a_users_rule_names_the_objects() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        reshaped([1, 2], 3, lambda array, shape: 1 // 0)
    assert caught.value.__notes__ == ["from the rule for the objects 'state', from shape (2,) to (3,)"]
