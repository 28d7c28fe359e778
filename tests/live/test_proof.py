"""redistribute(verify=True): what a transport does to bytes is found, on every rank, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardtree
from shardtree import Mesh, ShardedTensor, World, redistribute
from shardtree import PartitionSpec as P
from shardtree.errors import IntegrityError, RemoteError
from shardtree.fingerprints import bytes_total
from shardtree.testing import random_bits
from shardtree.traces import Kind
from tests.live.test_redistribute import Case, cases, check_redistribute, example, failures

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

EXAMPLES = settings.default.max_examples if settings.default else 100
Buffers = Mapping[int, torch.Tensor]


@pytest.mark.slow
@settings(max_examples=EXAMPLES // 2)
@given(cases(), st.booleans())
def test_nothing_is_alleged_where_all_arrived(case: Case, relay: bool) -> None:
    check_redistribute(case, verify=True, relay=relay)


# What a transport may do to the bytes that came, and whether that changed any.


def flip(random: Random, came: dict[int, torch.Tensor], before: dict[int, torch.Tensor]) -> None:
    data = came[random.choice(list(came))]
    data[random.randrange(data.numel())] ^= 1 << random.randrange(8)


def swap(random: Random, came: dict[int, torch.Tensor], before: dict[int, torch.Tensor]) -> None:
    one, other = two_pieces(random, came)
    one[:], other[:] = other.clone(), one.clone()


def repeat(random: Random, came: dict[int, torch.Tensor], before: dict[int, torch.Tensor]) -> None:
    one, other = two_pieces(random, came)
    one[:] = other


def two_pieces(random: Random, came: dict[int, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    data = came[random.choice(list(came))]
    size = random.randint(1, max(1, data.numel() // 2))
    first = random.randint(0, data.numel() - size) // size * size
    return data[:size], data[first : first + size]


def stale(random: Random, came: dict[int, torch.Tensor], before: dict[int, torch.Tensor]) -> None:
    peer = random.choice(list(came))
    came[peer][:] = before[peer]


def roll(random: Random, came: dict[int, torch.Tensor], before: dict[int, torch.Tensor]) -> None:
    data = came[random.choice(list(came))]
    data[:] = data.roll(random.randrange(data.numel()))


def exchange(random: Random, came: dict[int, torch.Tensor], before: dict[int, torch.Tensor]) -> None:
    """Two tensors change places: those of two peers, or the halves of a message that holds two."""
    sizes = [(one, other) for one in came for other in came if one < other and came[one].shape == came[other].shape]
    halves = came[next(iter(came))].tensor_split(2)
    one, other = (came[peer] for peer in random.choice(sizes)) if sizes else halves
    if one.shape == other.shape:
        one[:], other[:] = other.clone(), one.clone()


FAULTS = [flip, swap, repeat, stale, roll, exchange]


@dataclass(frozen=True)
class Way:
    """From one layout into another, by a call's options; ranks that hold or want nothing take part too."""

    source: list[Any]
    target: list[Any]
    options: dict[str, Any] = field(default_factory=dict)
    receivers: tuple[int, ...] = (0, 1, 2, 3)


def state(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    shapes = {"up": (16, 6), "down": (8, 24), "experts": (4, 8, 3)}
    return {key: random_bits(shape, dtype, number) for number, (key, shape) in enumerate(shapes.items())}


def laid(whole: dict[str, torch.Tensor], mesh: Mesh, *specs: P) -> list[Any]:
    trees = shardtree.shard(whole, mesh, dict(zip(whole, specs, strict=True)))
    return [shardtree.map_data(torch.clone, tree) for tree in trees]


def widened(whole: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {key: torch.randn(tensor.shape).to(dtype) for key, tensor in whole.items()}


def tp(whole: dict[str, torch.Tensor], size: int) -> list[Any]:
    return laid(whole, Mesh(tp=size), P("tp"), P(None, "tp"), P(None, "tp"))


def ways() -> dict[str, Way]:
    bits, half, eighth = (state(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn))
    wide = widened(bits, torch.float32)
    halves = shardtree.trace(
        lambda given: {"top": given["up"][:8].T, "rest": given["down"].to(torch.bfloat16)},
        {key: Kind(tuple(tensor.shape), tensor.dtype) for key, tensor in wide.items()},
    )
    made = {"top": torch.zeros(6, 8), "rest": torch.zeros(8, 24, dtype=torch.bfloat16)}
    experts = partial(laid, bits)
    return {
        "TP2 to TP8": Way(tp(bits, 2), tp(bits, 8)),
        "bf16, with relays": Way(tp(half, 2), tp(half, 4), {"relay": True}),
        "FP8, in small steps": Way(tp(eighth, 4), tp(eighth, 2), {"max_bytes_in_flight": 61}),
        "EP to TP": Way(experts(Mesh(ep=4), P(), P(), P("ep")), experts(Mesh(tp=4), P("tp"), P(), P(None, "tp"))),
        "cast to bf16": Way(tp(wide, 2), tp(widened(bits, torch.bfloat16), 4), {"cast": True, "donate": True}),
        "cast to FP8": Way(tp(wide, 2), tp(widened(bits, torch.float8_e5m2), 4), {"cast": True}),
        "traced": Way(tp(wide, 2), laid(made, Mesh(tp=4), P("tp"), P("tp")), {"transform": halves}),
    }


def planned(way: Way) -> Way:
    """Return a way whose ranks all have its plan, unless a trace makes it: as in the steps of a training."""
    if "transform" in way.options:
        return way
    plan = shardtree.plan_reshard(way.source, way.target, cast=way.options.get("cast", False))
    receivers = tuple(rank for rank, nbytes in plan.received.items() if nbytes)
    return replace(way, options={"plan": plan} | way.options, receivers=receivers)


WAYS = {name: planned(way) for name, way in ways().items()}


def check_found(name: str, fault: Callable[..., None], seed: int, run: Callable[..., Any] = redistribute) -> bool:
    """Raise unless a fault of one rank is an error on all that names its link; return whether it changed a byte."""
    way, random = WAYS[name], Random(seed)
    size = max(len(way.source), len(way.target))
    culprit = random.choice(way.receivers)
    at = random.randrange(3 if "max_bytes_in_flight" in way.options else 1)
    done: dict[int, bool] = {}

    def on_rank(world: World) -> Any:
        calls: list[int] = []

        def faulty(outgoing: Buffers, incoming: Buffers) -> None:
            before = {peer: data.clone() for peer, data in incoming.items()}
            world.exchange(outgoing, incoming)
            calls.append(1)
            if world.rank == culprit and incoming and not done and len(calls) > at:
                came = {peer: data.clone() for peer, data in incoming.items()}
                for _ in range(4):  # some change nothing, as two pieces that are the same
                    fault(random, dict(incoming), before)
                done.update({peer: True for peer, data in incoming.items() if not torch.equal(data, came[peer])})

        tree, target = (trees[world.rank] if world.rank < len(trees) else None for trees in (way.source, way.target))
        return run(tree, target, world=world, transport=faulty, verify=True, **way.options)

    for error in failures(on_rank, size):
        assert (error is not None) == bool(done), (error, done)
        assert error is None or isinstance(error, IntegrityError)
        for peer in done:
            assert f"rank {peer} → rank {culprit}" in str(error)
    return bool(done)


def unverified(*trees: Any, verify: bool, **options: Any) -> Any:
    """The planted fault: the transport is believed."""
    return redistribute(*trees, **options)


def check_many(seeds: range, run: Callable[..., Any] = redistribute) -> None:
    names = list(WAYS)
    found = sum(check_found(names[seed % len(names)], FAULTS[seed % len(FAULTS)], seed, run) for seed in seeds)
    assert found > len(seeds) * 0.8, "faults that do nothing"


def test_what_a_transport_does_to_bytes_is_found() -> None:
    check_many(range(126))


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
def test_what_a_transport_does_to_bytes_is_found_a_hundred_thousand_times() -> None:
    check_many(range(100_000))


def test_the_law_catches_a_transport_that_is_believed() -> None:
    with pytest.raises(AssertionError):
        check_many(range(20), unverified)


def told(verify: bool | list[bool], transport: Callable[..., Any] | None = None) -> list[BaseException | None]:
    """Return what each of five ranks raises, three that hold rows and two that want columns."""
    case = example()

    def on_rank(world: World) -> Any:
        def moved(outgoing: Buffers, incoming: Buffers) -> None:
            world.exchange(outgoing, incoming)
            if transport is not None:
                transport(world.rank, outgoing, incoming)

        own = verify if isinstance(verify, bool) else verify[world.rank]
        tree, target = case.sources.get(world.rank), case.targets.get(world.rank)
        return redistribute(tree, target, world=world, transport=moved, verify=own)

    return failures(on_rank)


def test_the_error_has_tensor_box_and_ranks_and_is_the_same_everywhere() -> None:
    def spoil(rank: int, outgoing: Buffers, incoming: Buffers) -> None:
        if rank == 4:
            for sender in (0, 2):
                incoming[sender][5] ^= 1

    for error in told(True, spoil):
        assert isinstance(error, IntegrityError)
        assert "'w' [0:2, 2:4]: rank 0 → rank 4" in str(error)
        assert "'w' [4:6, 2:4]: rank 2 → rank 4" in str(error)
        assert "rank 1" not in str(error)


def test_what_was_changed_on_its_way_and_back_again_is_an_error_too() -> None:
    case = example()

    def on_rank(world: World) -> Any:
        source = (
            {"w": replace(tree["w"], data=tree["w"].data.clone())} if (tree := case.sources.get(world.rank)) else None
        )

        def moved(outgoing: Buffers, incoming: Buffers) -> None:
            for data in outgoing.values() if world.rank == 1 else ():
                data[0] ^= 1  # in the shard's own memory, where it lies in one piece; so both sides have it afterwards
            world.exchange(outgoing, incoming)

        return redistribute(source, case.targets.get(world.rank), world=world, transport=moved, verify=True)

    for error in failures(on_rank):
        assert isinstance(error, IntegrityError) and "rank 1 → rank 3" in str(error)


def test_ranks_that_differ_about_it_are_told_so() -> None:
    for error in told([True, True, False, True, True]):
        assert isinstance(error, shardtree.errors.WorldError) and "verify=False" in str(error)


def test_unverified_nothing_is_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardtree.live._proof.bytes_total", None)
    assert told(False) == [None] * 5
    for error in told(True):
        assert isinstance(error, RemoteError) and error.phase == "redistribute: compare sums"


# The sum of bytes.


@given(st.integers(0, 30_000), st.integers(0, 9), st.randoms(use_true_random=False))
def test_each_byte_and_its_place_counts_and_memory_does_not(size: int, begin: int, random: Random) -> None:
    memory = random_bits((size + begin + 8,), torch.uint8, random.randrange(1000))
    data = memory[begin : begin + size]
    total = bytes_total(data)
    assert total == bytes_total(data.clone())
    if size:
        place = random.randrange(size)
        changed = data.clone()
        changed[place] ^= 1 << random.randrange(8)
        assert bytes_total(changed) != total
        rolled = data.roll(place)
        assert (bytes_total(rolled) == total) == torch.equal(rolled, data)


def test_what_was_lost_counts_before_what_follows_from_it_and_a_merge_that_fails_is_told() -> None:
    """Tied weights whose two sources differ are refused by the join, which sees what arrived alone."""

    def on_rank(world: World, keys: tuple[str, ...], lost: bool) -> Any:
        def moved(outgoing: Buffers, incoming: Buffers) -> None:
            world.exchange(outgoing, incoming)
            for data in incoming.values() if lost else ():
                data[0] ^= 1

        memory = torch.zeros(4)
        given = {key: ShardedTensor.from_rank_offsets(key, torch.full((4,), float(at))) for at, key in enumerate(keys)}
        tied = {key: ShardedTensor.from_rank_offsets(key, memory) for key in keys}
        ends = (given, None) if world.rank == 0 else (None, tied)
        return redistribute(*ends, world=world, transport=moved, verify=True, donate=True)

    for error in failures(partial(on_rank, keys=("a", "b"), lost=True), 2):
        assert isinstance(error, IntegrityError) and "'a' [0:4]: rank 0 → rank 1" in str(error)
    for error in failures(partial(on_rank, keys=("a", "b"), lost=False), 2):
        assert isinstance(error, RemoteError) and (error.phase, list(error.failures)) == ("redistribute: join", [1])
    assert failures(partial(on_rank, keys=("a",), lost=False), 2) == [None, None]
