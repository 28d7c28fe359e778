"""Loops as engines write them: traced on every rank, they give what they give eagerly, and read what they need."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import pytest
import torch

import shardtree as st
from tests.traces import loaders
from tests.traces.loaders import LOADERS, Loader, Weights
from tests.traces.programs import places

CASES = [(name, ranks) for name, loader in LOADERS.items() for ranks in loader.ranks]


def given(loader: Loader) -> dict[str, torch.Tensor]:
    found, start = {}, 1
    for name, shape in loader.sources.items():
        found[name] = torch.arange(start, start + prod(shape), dtype=torch.float32).reshape(shape)
        start += prod(shape)
    return found


def traced(loader: Loader, rank: int, ranks: int, load: Callable[..., None] | None = None) -> st.Trace:
    parameters, own = loader.make(rank, ranks)
    return st.trace(lambda tensors: (load or own)(tensors.items()), given(loader), into=lambda: parameters)


def eager(loader: Loader, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    parameters, load = loader.make(rank, ranks)
    load(given(loader).items())
    return {name: each.data for name, each in parameters.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_a_traced_loader_does_what_it_does(name: str, ranks: int) -> None:
    loader = LOADERS[name]
    traces = [traced(loader, rank, ranks) for rank in range(ranks)]
    for rank, found in enumerate(traces):
        outputs = found(given(loader))
        for output, tensor in eager(loader, rank, ranks).items():
            assert outputs[output].dtype == tensor.dtype
            assert torch.equal(outputs[output], tensor)
        assert asked(found) == needed(found), "each rank reads what it needs, and no more"
    # No false alarm, and of all ranks together nothing is lost.
    assert traces[0].check(*traces[1:]) == ()


def asked(found: st.Trace) -> int:
    return sum(prod(box.shape) for boxes in found.reads().values() for box in boxes)


def needed(found: st.Trace) -> int:
    from shardtree.traces._evaluate import leaves

    read = {
        (move.root, place)
        for moves in found.moves.values()
        for move in leaves(moves)
        for place in places(move, 1).tolist()
    }
    return len(read)


@pytest.mark.parametrize("name", [name for name in LOADERS if name != "scales of blocks"])
def test_there_is_a_way_back_from_one_rank(name: str) -> None:
    loader = LOADERS[name]
    found = traced(loader, 0, 1)
    back = found.inverse()(found(given(loader)))
    assert all(torch.equal(back[source], tensor) for source, tensor in given(loader).items())


def test_there_is_none_from_scales() -> None:
    with pytest.raises(st.errors.TraceError, match="'w' is computed: mul"):
        traced(LOADERS["scales of blocks"], 0, 1).inverse()


# Faults before the run: planted, and found.


def kinds(found: st.Trace, *others: st.Trace) -> set[str]:
    return {each.kind for each in found.check(*others)}


def changed(name: str, change: Callable[[Weights], Weights], ranks: int = 1) -> list[st.Trace]:
    found = []
    for rank in range(ranks):
        parameters, load = LOADERS[name].make(rank, ranks)
        run = lambda tensors, load=load: load(change(tensors.items()))  # noqa: E731
        found.append(st.trace(run, given(LOADERS[name]), into=lambda parameters=parameters: parameters))
    return found


QKV = "qkv by shard id, kv heads on several ranks"


def test_keys_and_values_swapped_are_found_by_comparing_with_another_loader() -> None:
    swap = {"q_proj": "q_proj", "k_proj": "v_proj", "v_proj": "k_proj"}
    [wrong] = changed(QKV, lambda weights: [(swap[name], weight) for name, weight in weights])
    right = traced(LOADERS[QKV], 0, 1)
    assert wrong.check() == ()
    first, second = right.diff(wrong)["qkv"]
    assert str(first) == (
        "'qkv': 96 elements are [32:+a, b] = k_proj[a, b]  (a=8 b=12), not [32:+a, b] = v_proj[a, b]  (a=8 b=12)"
    )
    assert (first.elements, second.elements) == (96, 96)
    assert right != wrong


def test_a_missing_tensor_is_unused_and_its_rows_unwritten() -> None:
    [wrong] = changed(QKV, lambda weights: [pair for pair in weights if pair[0] != "k_proj"])
    assert [(each.kind, each.name, each.elements, each.where) for each in wrong.check()] == [
        ("unused", "k_proj", 96, "[0:8, 0:12]"),
        ("unwritten", "qkv", 96, "[32:40, 0:12]"),
    ]


def test_one_written_twice_is_overwritten() -> None:
    names = {"gate": "gate", "up": "gate"}
    [wrong] = changed("gate and up", lambda weights: [(names[name], weight) for name, weight in weights])
    assert kinds(wrong) == {"unused", "overwritten", "unwritten"}


def test_a_narrow_off_by_one_and_rows_never_written_are_found() -> None:
    def off_by_one(rank: int, ranks: int):  # type: ignore[no-untyped-def]
        weight_of = loaders.empty(8, 12)

        def load(weights: Weights) -> None:
            [(_, weight)] = weights
            weight_of.data[:7].copy_(weight.narrow(0, rank * 8 + 1, 7))

        return {"w": weight_of}, load

    loader = Loader("", {"w": (16, 12)}, off_by_one)
    two = [traced(loader, rank, 2) for rank in range(2)]
    assert [str(each) for each in two[0].check(two[1]) if each.kind == "unused"] == [
        "'w': 24 elements reach no output: [0:9:8, 0:12]"
    ]
    assert kinds(*two) == {"unused", "unwritten"}


def test_a_chunk_along_the_wrong_dimension_is_found() -> None:
    def wrong(rank: int, ranks: int):  # type: ignore[no-untyped-def]
        weight_of = loaders.empty(8, 16)

        def load(weights: Weights) -> None:
            [(_, weight)] = weights
            weight_of.data.copy_(weight.chunk(2, dim=1)[rank].reshape(8, 16))

        return {"w": weight_of}, load

    loader = Loader("", {"w": (16, 16)}, wrong)
    assert kinds(traced(loader, 0, 2), traced(loader, 1, 2)) == {"bends"}


def test_the_wrong_head_of_keys_on_several_ranks_is_found_by_comparing_with_another_loader() -> None:
    def dealt_in_turn(rank: int, ranks: int):  # type: ignore[no-untyped-def]
        """Ranks 0 and 2 get head 0, where 0 and 1 should."""
        q, kv = loaders.HEADS // ranks * loaders.SIZE, loaders.SIZE
        qkv = loaders.empty(q + 2 * kv, loaders.HIDDEN)

        def load(weights: Weights) -> None:
            for name, weight in weights:
                start, count, part = {"q": (0, q, rank), "k": (q, kv, rank % 2), "v": (q + kv, kv, rank % 2)}[name[0]]
                qkv.data.narrow(0, start, count).copy_(loaders.rows_of(weight, part, count))

        return {"qkv": qkv}, load

    loader = Loader("", loaders.ATTENTION, dealt_in_turn)
    wrong = [traced(loader, rank, 4) for rank in range(4)]
    right = [traced(LOADERS[QKV], rank, 4) for rank in range(4)]
    assert wrong[0].check(*wrong[1:]) == ()  # all heads are used, each on two ranks
    assert [
        [each.elements for each in one.diff(other).get("qkv", ())] for one, other in zip(right, wrong, strict=True)
    ] == [
        [],
        [48, 48],
        [48, 48],
        [],
    ]
