"""The laws of lenses, over all ready ones: whatever the cutting, dtype or state, the same is stored and comes back."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from shardtree import lenses
from shardtree.lenses import Lens, StoredForm, as_factory, compose, gate_and_up, padded_axis, transposed
from shardtree.mapping import ShardedTensor
from shardtree.testing import (
    LENS_CASES,
    LensCase,
    check_factory,
    check_lens,
    cut,
    dtypes,
    even_layout,
    first_difference,
    layouts,
    random_bits,
)
from tests.lenses.oracles import ORACLES

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

cases = pytest.mark.parametrize("name", LENS_CASES)
# The table is long: a quarter of the examples for each.
some_examples = settings(max_examples=max(8, settings.default.max_examples // 4))


def drawn_shards(data: some.DataObject, case: LensCase, ranks: int) -> list[ShardedTensor]:
    layout = data.draw(layouts(case.shape, ranks, prepended=case.prepended))
    dtype, seed = data.draw(dtypes()), data.draw(some.integers(0, 99))
    wholes = {key: random_bits(case.shape, dtype, seed + number) for number, key in enumerate(case.keys)}
    return [shard for key in case.keys for rank in range(ranks) for shard in cut(layout, key, wholes[key], rank)]


@pytest.mark.slow
@cases
@some_examples
@given(some.data())
def test_boxes_agree_and_come_back(name: str, data: some.DataObject) -> None:
    case = LENS_CASES[name]
    check_lens(case.lens, drawn_shards(data, case, data.draw(some.integers(1, 4))))


@cases
def test_what_is_stored_is_what_torch_makes_of_whole_tensors(name: str) -> None:
    case = LENS_CASES[name]
    held = [
        torch.randn(case.shape, generator=torch.Generator().manual_seed(number)) for number in range(len(case.keys))
    ]
    layout = even_layout(case.shape, 1)
    pieces = layout.pieces
    if case.prepended:
        places = range(case.shape[0])
        pieces = tuple(
            replace(pieces[0], offset=(place, *pieces[0].offset[1:]), shape=(1, *pieces[0].shape[1:]))
            for place in places
        )
    layout = replace(layout, pieces=pieces, prepended=case.prepended, grid=None)
    shards = [shard for key, tensor in zip(case.keys, held, strict=True) for shard in cut(layout, key, tensor, 0)]
    stored = check_lens(case.lens, shards)
    expected = ORACLES[name](held)
    assert sorted(stored) == sorted(expected)
    for key, tensor in expected.items():
        assert first_difference(stored[key], tensor.contiguous()) is None, key


def test_there_is_a_case_for_each_ready_lens() -> None:
    functions = {
        name
        for name, value in vars(lenses).items()
        if inspect.isfunction(value) and inspect.signature(value).return_annotation == "Lens"
    }
    assert len(functions) > 12
    assert functions == {name.split(":")[0] for name in LENS_CASES}
    assert LENS_CASES.keys() == ORACLES.keys()


@pytest.mark.slow
@cases
@some_examples
@given(some.data())
def test_merge_undoes_build_on_flat_ranges_and_states(name: str, data: some.DataObject) -> None:
    case = LENS_CASES[name]
    if "padd" in name:
        case = replace(case, shape=(2, 3) if "axis 1" in name else (5, 2))  # padding doesn't come back
    layout = data.draw(layouts(case.shape, 1, prepended=case.prepended))
    shards = cut(layout, case.keys[0], random_bits(case.shape, data.draw(dtypes()), 1), 0)
    boxes = [shard for shard in shards if shard.flattened_range is None]
    if boxes:
        shard = data.draw(some.sampled_from(boxes))
        volume = torch.Size(shard.local_shape).numel()
        start, stop = sorted(data.draw(some.tuples(*[some.integers(0, volume)] * 2)))
        check_factory(as_factory(shard, case.lens), flat=[slice(start, stop), slice(0, volume)])


@pytest.mark.slow
@some_examples
@given(some.data())
def test_composition_is_associative(data: some.DataObject) -> None:
    three = [
        gate_and_up(tensor_parallel=2, part="w", names=("gate", "up")),
        transposed(),
        lenses.rearranged("d (a f) -> a d f", a=2),
    ]
    first, second, third = three
    case = LensCase(compose(*three), (8, 4))
    shards = drawn_shards(data, case, 3)
    nested = (
        compose(first, compose(second, third)),
        compose(compose(first, second), third),
        compose(compose(), first, second, third, compose()),
    )
    expected = [outline(as_factory(shard, case.lens).build()) for shard in shards]
    check_lens(case.lens, shards)
    for lens in nested:
        assert [outline(as_factory(shard, lens).build()) for shard in shards] == expected
        for shard in (shard for shard in shards if shard.flattened_range is None):
            built = lens(shard)
            assert first_difference(built.merge([part.data for part in built.shards]), shard.data) is None


def outline(tree: dict[str, Any]) -> list[tuple[Any, ...]]:
    shards = [leaf for leaf in tree.values() if isinstance(leaf, ShardedTensor)]
    return [(shard.key, shard.global_shape, shard.global_offset, shard.local_shape) for shard in shards]


# Each a lens that breaks one law.


def plain_rows(shard: ShardedTensor) -> StoredForm:
    """Whether a rank's halves stay together depends on how the tensor is cut."""
    lens = gate_and_up(tensor_parallel=shard.global_shape[0] // shard.local_shape[0])
    return lens(shard)


def swapped(shard: ShardedTensor) -> StoredForm:
    built = gate_and_up(tensor_parallel=2)(shard)
    return replace(built, merge=lambda parts: built.merge(list(parts)[::-1]))


def twice(shard: ShardedTensor) -> StoredForm:
    """What is stored under two keys, and merged from one of them."""
    return StoredForm((shard, replace(shard, key=f"{shard.key}.copy")), lambda parts: parts[0])


def by_dtype(shard: ShardedTensor) -> StoredForm:
    return (gate_and_up(tensor_parallel=2) if shard.dtype == torch.float32 else transposed())(shard)


def only_with_data(shard: ShardedTensor) -> StoredForm:
    return compose(*([] if shard.data is None else [gate_and_up(tensor_parallel=2)]))(shard)


def forgets_rows(shard: ShardedTensor) -> StoredForm:
    built = padded_axis(6)(shard)
    return replace(built, shards=tuple(replace(part, global_shape=shard.global_shape) for part in built.shards))


FAULTS: list[tuple[Lens, str]] = [
    (plain_rows, "boxes do not agree"),
    (swapped, "merge does not undo build"),
    (twice, "build does not undo merge"),
    (by_dtype, "is cut differently"),
    (only_with_data, "without data"),
    (forgets_rows, "are on no rank"),
]


@pytest.mark.parametrize(("lens", "message"), FAULTS)
def test_the_law_catches(lens: Lens, message: str) -> None:
    shards = [shard for rank in range(2) for shard in cut(even_layout((8, 3), 2, 0), "w", torch.randn(8, 3), rank)]
    check_lens(gate_and_up(tensor_parallel=2), shards)
    with pytest.raises(AssertionError, match=message):
        check_lens(lens, shards)


def test_the_oracle_catches_a_lens_of_other_numbers() -> None:
    """A sound lens, but not the one that is asked for."""
    case = LENS_CASES["gate_and_up: 3 ranks"]
    held = torch.randn(case.shape)
    [(key, expected)] = ORACLES["gate_and_up: 3 ranks"]([held]).items()
    for ranks, is_right in ((3, True), (2, False)):
        stored = check_lens(gate_and_up(tensor_parallel=ranks), cut(even_layout(case.shape, 1), case.keys[0], held, 0))
        assert torch.equal(stored[key], expected) == is_right
