"""The laws of traces, over random programs of views, cat, stack, copies into views, gathers, casts and functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as draw

import shardtree as st
from shardtree.errors import KeyMismatch, ShapeError, TraceError
from shardtree.traces import Trace
from shardtree.traces._local import localized
from shardtree.traces._moves import Moves
from tests.traces import programs
from tests.traces.programs import MOVES, ONE_TO_ONE, VALUES, Tensors, bits_of, box_of, cut, program

seeds = draw.integers(0, 2**32)


def equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    kinds = {name: (each.shape, each.dtype) for name, each in one.items()}
    return kinds == {name: (each.shape, each.dtype) for name, each in other.items()} and all(
        torch.equal(bits_of(each), bits_of(other[name])) for name, each in one.items()
    )


def drawn(seed: int) -> tuple[Random, Tensors, Callable[[Tensors], Tensors], Trace]:
    """Return what a law draws on, some tensors, a program, and the program's trace."""
    random = Random(seed)
    tensors = programs.given(random)
    run = program(seed, (*MOVES, *VALUES) if seed % 2 else MOVES)
    return random, tensors, run, st.trace(run, tensors)


def check_eager(seed: int, evaluate: Callable[[Trace, Tensors], Tensors] = Trace.__call__) -> None:
    _, tensors, run, found = drawn(seed)
    assert equal(evaluate(found, tensors), run(tensors))


@given(seeds)
def test_a_trace_does_what_the_code_does(seed: int) -> None:
    check_eager(seed)


@given(seeds)
def test_so_it_does_in_inference_mode_and_through_ordinary_buffers(seed: int) -> None:
    _, tensors, run, _ = drawn(seed)

    def within(given: Tensors) -> Tensors:
        random = Random(seed)
        with torch.inference_mode():
            outputs = run({name: buffered(random, each) for name, each in given.items()})
            return {
                name: each.flatten() if random.random() < 0.5 else each.contiguous() for name, each in outputs.items()
            }

    assert equal(st.trace(within, tensors)(tensors), within(tensors))


def buffered(random: Random, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or a copy of it in an ordinary one, or in a part of one."""
    if random.random() < 0.4:
        return tensor
    larger = torch.zeros([size + random.randint(0, 1) for size in tensor.shape], dtype=tensor.dtype)
    return larger[tuple(slice(0, size) for size in tensor.shape)].copy_(tensor)


def test_the_law_catches_moves_that_are_taken_one_element_late() -> None:
    def late(trace: Trace, tensors: Tensors) -> Tensors:
        moves = {
            name: Moves(
                move._replace(at=move.at - 1) if isinstance(move.root, str) and move.at else move for move in each
            )
            for name, each in trace.moves.items()
        }
        return replace(trace, moves=moves)(tensors)

    with pytest.raises(AssertionError):
        [check_eager(seed, late) for seed in range(30)]


@given(seeds)
def test_a_part_of_a_trace_makes_a_part_of_the_whole(seed: int) -> None:
    check_narrow(seed, Trace.narrow)


def check_narrow(seed: int, narrow: Callable[..., Trace]) -> None:
    random, tensors, _, found = drawn(seed)
    boxes = {name: box_of(random, kind.shape) for name, kind in found.outputs.items() if random.random() < 0.8}
    part, whole = narrow(found, boxes), found(tensors)
    assert equal(part(tensors), {name: cut(whole[name], box) for name, box in boxes.items()})


def test_the_law_of_parts_catches_a_box_of_the_transposed() -> None:
    def careless(trace: Trace, boxes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]) -> Trace:
        return trace.narrow({name: ((0,) * len(offset), shape) for name, (offset, shape) in boxes.items()})

    with pytest.raises(AssertionError):
        [check_narrow(seed, careless) for seed in range(30)]


@given(seeds)
def test_what_is_read_in_boxes_is_what_is_needed(seed: int) -> None:
    random, tensors, _, found = drawn(seed)
    part = found.narrow({name: box_of(random, kind.shape) for name, kind in found.outputs.items()})
    for name, kind in part.outputs.items():
        local = localized(part, name, (0,) * len(kind.shape), kind.shape)
        made = local.output([cut(tensors[root], box) for root, box in local.boxes])
        assert torch.equal(made, part(tensors)[name])
    # Exactly the elements that are needed: all others may be anything, and these may not.
    poisoned = {name: torch.full_like(each, -7) for name, each in tensors.items()}
    for name, some in part.reads().items():
        for box in some:
            where = tuple(slice(low, low + size) for low, size in zip(*box, strict=True))
            poisoned[name][where] = tensors[name][where]
    assert equal(part(poisoned), part(tensors))
    used = {(name, index) for name, index in used_elements(part)}
    asked = {
        (name, int(index))
        for name, some in part.reads().items()
        for box in some
        for index in cut(torch.arange(tensors[name].numel()).reshape(tensors[name].shape), box).reshape(-1)
    }
    assert asked == used


def used_elements(trace: Trace):  # type: ignore[no-untyped-def]
    from shardtree.traces._evaluate import leaves

    for moves in trace.moves.values():
        for move in leaves(moves):
            yield from ((move.root, int(place)) for place in programs.places(move, 1))


def counts(tensors: Tensors, outputs: Tensors) -> list[int]:
    """Return how often each of the elements, which are the numbers from 1, is among the outputs."""
    total = sum(each.numel() for each in tensors.values())
    found = torch.cat([each.reshape(-1).abs().to(torch.int64) for each in outputs.values()])
    return torch.bincount(found, minlength=total + 1).tolist()


@given(seeds)
def test_a_trace_has_an_inverse_exactly_when_it_is_one_to_one(seed: int) -> None:
    random = Random(seed)
    tensors = programs.given(random)
    run = program(seed, ONE_TO_ONE if seed % 2 else MOVES)
    found, outputs = st.trace(run, tensors), run(tensors)
    for name, one in list(found.tied.items()):
        assert torch.equal(outputs.pop(name), outputs[one])
    often = counts(tensors, outputs)[1:]
    if set(often) == {1}:
        back = found.inverse()
        assert equal(back(outputs), tensors)
        assert {each.kind for each in found.check()} <= {"bends", "overwritten"}
        if not any(isinstance(move.root, st.traces._steps.Constant) for each in found.moves.values() for move in each):
            assert back.inverse() == replace_tied(found)
            assert found.then(back) == identity(tensors)
            assert back.then(replace_tied(found)) == identity(outputs)
    else:
        with pytest.raises(TraceError, match="is not one to one"):
            found.inverse()
        if max(often) == 1:
            back = found.inverse(drop=True)
            assert equal(back(outputs, fill=0), {name: each * kept(each, often) for name, each in tensors.items()})
            assert back.inverse(drop=True).inverse(drop=True) == back


def kept(tensor: torch.Tensor, often: list[int]) -> torch.Tensor:
    return torch.tensor(often).reshape(-1)[tensor.to(torch.int64) - 1]


def replace_tied(trace: Trace) -> Trace:
    names = [name for name in trace.outputs if name not in trace.tied]
    return Trace(
        trace.sources, {name: trace.outputs[name] for name in names}, {name: trace.moves[name] for name in names}
    )


def identity(tensors: Tensors) -> Trace:
    return st.trace(dict, tensors)


def test_the_law_of_inverses_catches_one_that_loses_its_way() -> None:
    """The planted fault: a transpose is taken for its own inverse."""
    tensors = {"w": torch.arange(6.0).reshape(2, 3)}
    turned = st.trace(lambda given: {"w": given["w"].T.reshape(2, 3)}, tensors)
    assert not equal(turned(turned(tensors)), tensors)
    assert turned.then(turned) != identity(tensors)
    assert turned.then(turned.inverse()) == identity(tensors)


@given(seeds)
def test_composition_is_one_after_the_other(seed: int) -> None:
    random = Random(seed)
    tensors = programs.given(random)
    first, second = program(seed, (*MOVES, *VALUES)), program(seed + 1, (*MOVES, *VALUES))
    middle = first(tensors)
    one, two = st.trace(first, tensors), st.trace(second, middle)
    assert equal(one.then(two)(tensors), second(middle))
    both = st.trace(lambda given: second(first(given)), tensors)
    assert one.then(two) == both
    assert both.diff(one.then(two)) == {}


@given(seeds)
def test_traces_are_equal_exactly_when_they_give_equal_tensors(seed: int) -> None:
    """For moves alone: of two functions, only the names are compared."""
    check_equality(seed, Trace.__eq__)


def check_equality(seed: int, eq: Callable[[Trace, Trace], bool]) -> None:
    random = Random(seed)
    tensors = programs.given(random)
    run = program(seed, MOVES)
    found = st.trace(run, tensors)
    other = st.trace(lambda given: one_by_one(run(given), random), tensors)
    assert eq(found, other)
    assert eq(other, found)
    changed = st.trace(lambda given: swapped(run(given), Random(seed)), tensors)
    same = equal(run(tensors), swapped(run(tensors), Random(seed)))
    assert eq(found, changed) == same == eq(changed, found)


def one_by_one(tensors: Tensors, random: Random) -> Tensors:
    """Return the same tensors, copied in another way: by rows, or by columns, or each element for itself."""
    found = {}
    for name, each in tensors.items():
        new = torch.empty(each.shape, dtype=each.dtype)
        dim = random.randrange(each.ndim)
        for index in random.sample(range(each.shape[dim]), each.shape[dim]):
            new.select(dim, index).copy_(each.select(dim, index))
        found[name] = new
    return found


def swapped(tensors: Tensors, random: Random) -> Tensors:
    name = random.choice(sorted(tensors))
    flat = tensors[name].reshape(-1)
    first, last = random.randrange(flat.numel()), random.randrange(flat.numel())
    order = torch.arange(flat.numel())
    order[[first, last]] = order[[last, first]]
    return {**tensors, name: flat[order].reshape(tensors[name].shape)}


def test_the_law_of_equality_catches_a_comparison_of_forms() -> None:
    def by_form(one: Trace, other: Trace) -> bool:
        return all(list(moves) == list(other.moves[name]) for name, moves in one.moves.items())

    with pytest.raises(AssertionError):
        [check_equality(seed, by_form) for seed in range(30)]


def test_views_slices_and_copies_of_one_thing_are_equal() -> None:
    given = {"w": torch.empty(64, 2)}

    def by_view(tensors: Tensors) -> Tensors:
        return {"w": tensors["w"].view(4, 2, 8, 2).transpose(1, 2).reshape(64, 2)}

    def by_slices(tensors: Tensors) -> Tensors:
        heads = tensors["w"].split(16)
        return {"w": torch.cat([torch.stack([head[:8], head[8:]], 1).reshape(16, 2) for head in heads])}

    def by_index(tensors: Tensors) -> Tensors:
        return {"w": tensors["w"][torch.arange(64).view(4, 2, 8).transpose(1, 2).reshape(-1)]}

    one, *others = (st.trace(each, given) for each in (by_view, by_slices, by_index))
    assert all(one == other for other in others)
    assert len(others[1].moves["w"]) == 1, "a regular gather is one move"
    rows = st.trace(lambda tensors: {"w": torch.cat([tensors["w"][:1]] * 32)}, given)
    assert rows == st.trace(lambda tensors: {"w": tensors["w"][:1].expand(32, 2)}, given)


def test_casts_that_lose_nothing_cancel_and_others_do_not() -> None:
    given = {"w": torch.empty(4, dtype=torch.bfloat16)}
    same = st.trace(dict, given)
    assert st.trace(lambda tensors: {"w": tensors["w"].float().bfloat16()}, given) == same
    assert st.trace(lambda tensors: {"w": tensors["w"].half().bfloat16()}, given) != same
    assert st.trace(lambda tensors: {"w": tensors["w"].neg().neg()}, given) == same
    wide = st.trace(lambda tensors: {"w": tensors["w"].float()}, given)
    assert wide.inverse().inverse() == wide
    with pytest.raises(TraceError, match="'w' is rounded: float32 -> bfloat16"):
        st.trace(lambda tensors: {"w": tensors["w"].bfloat16()}, {"w": torch.empty(4)}).inverse()
    with pytest.raises(TraceError, match="'w' is computed: add"):
        st.trace(lambda tensors: {"w": tensors["w"] + 1}, {"w": torch.empty(4)}).inverse()


def test_constants_are_compared_by_their_elements() -> None:
    def padded(value: float, *, whole: bool) -> Trace:
        def run(tensors: Tensors) -> Tensors:
            new = torch.full((4,), value) if whole else torch.cat([torch.full((2,), value), torch.full((2,), value)])
            new[:2].copy_(tensors["w"])
            return {"w": new}

        return st.trace(run, {"w": torch.empty(2)})

    assert padded(1.0, whole=True) == padded(1.0, whole=False)
    assert padded(1.0, whole=True) != padded(2.0, whole=True)
    assert padded(0.0, whole=True) != padded(-0.0, whole=True)


def test_unwritten_elements_are_an_error_or_filled() -> None:
    def run(tensors: Tensors) -> Tensors:
        new = torch.empty(4)
        new[1:3].copy_(tensors["w"])
        return {"w": new}

    found = st.trace(run, {"w": torch.empty(2)})
    with pytest.raises(TraceError, match="2 elements of 'w' are never written"):
        found({"w": torch.ones(2)})
    assert found({"w": torch.ones(2)}, fill=5.0)["w"].tolist() == [5, 1, 1, 5]
    with pytest.raises(TraceError, match="2 elements are never written"):
        found.inverse()
    assert found.inverse(drop=True)({"w": torch.arange(4.0)})["w"].tolist() == [1, 2]


def test_sources_of_another_kind_are_refused_all_at_once() -> None:
    found = st.trace(dict, {name: torch.empty(2) for name in "abc"})
    with pytest.raises(KeyMismatch, match="'b'\n  'c'"):
        found({"a": torch.ones(2)})
    with pytest.raises(ShapeError, match=r"'b': found float32\[3\], traced as float32\[2\]"):
        found({"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(2, dtype=torch.int8)})
    with pytest.raises(KeyMismatch, match="narrow: unknown outputs\n  'd'"):
        found.narrow({"d": ((0,), (1,))})
    with pytest.raises(ShapeError, match=r"'a': shape \(2,\) at offset \(1,\) of an output of shape \(2,\)"):
        found.narrow({"a": ((1,), (2,))})
    with pytest.raises(KeyMismatch, match="then: missing sources"):
        found.then(st.trace(dict, {"z": torch.empty(2)}))


def test_a_trace_has_no_hash_and_prints() -> None:
    found = st.trace(dict, {"w": torch.empty(2)})
    with pytest.raises(TypeError, match="unhashable"):
        hash(found)
    assert str(found) == "trace: 1 source -> 1 output\n  w: float32[2] =\n    [a] = w[a]  (a=2)"


@pytest.mark.parametrize(
    ("function", "is_advised"),
    [
        (lambda given: {"y": given["w"][1:]}, True),
        (lambda given: {"y": given["w"][1:].exp()}, False),
        (lambda given: {"y": torch.cat([given["w"][1:], given["w"][1:]])}, False),
    ],
)
def test_leaving_out_is_advised_only_where_it_gives_a_way_back(
    function: Callable[[Tensors], Tensors], is_advised: bool
) -> None:
    found = st.trace(function, {"w": torch.empty(4)})
    with pytest.raises(TraceError) as caught:
        found.inverse()
    assert ("Pass drop=True for an inverse that leaves these elements out." in str(caught.value)) == is_advised
    if is_advised:
        assert found.inverse(drop=True).outputs == found.sources
    else:
        with pytest.raises(TraceError):
            found.inverse(drop=True)
