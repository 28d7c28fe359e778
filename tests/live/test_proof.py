"""redistribute(verify=True): what a transport does to bytes is found, on every rank, and nothing else is."""

from __future__ import annotations

import re
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
from shardtree.core.fingerprints import bytes_total
from shardtree.errors import IntegrityError, RemoteError
from shardtree.live._proof import _xxh3, hash_for
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


# What a transport may do to a message that came: in place, given what was in the buffer before.

Data = torch.Tensor


def flip(random: Random, data: Data, before: Data) -> None:
    data[random.randrange(data.numel())] ^= 1 << random.randrange(8)


def repeat(random: Random, data: Data, before: Data) -> None:
    size = random.randint(1, max(1, data.numel() // 2))
    first = random.randint(0, data.numel() - size) // size * size
    data[:size] = data[first : first + size].clone()


def stale(random: Random, data: Data, before: Data) -> None:
    data[:] = before


def roll(random: Random, data: Data, before: Data) -> None:
    data[:] = data.roll(random.randrange(data.numel()))


def exchange(random: Random, data: Data, before: Data) -> None:
    """Two tensors of a message change places, or two runs of rows of one."""
    half = data.numel() // 2
    data[:half], data[-half:] = data[-half:].clone(), data[:half].clone()


FAULTS = [flip, repeat, stale, roll, exchange]


@dataclass(frozen=True)
class Way:
    """From one layout into another, by a call's options; ranks that hold or want nothing take part too."""

    source: list[Any]
    target: list[Any]
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = 1


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
        "FP8, in small steps": Way(tp(eighth, 4), tp(eighth, 2), {"max_bytes_in_flight": 61}, steps=5),
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
    return replace(way, options={"plan": plan} | way.options)


WAYS = {name: planned(way) for name, way in ways().items()}


def check_found(name: str, seed: int, run: Callable[..., Any] = redistribute) -> int:
    """Plant a fault in a message of each link, and raise unless all ranks hear of the links that it changed, and of no
    others; return how many these are."""
    way = WAYS[name]
    step, changed = seed % way.steps, set[tuple[int, int]]()

    def on_rank(world: World) -> Any:
        random, calls = Random(seed * 16 + world.rank), []

        def faulty(outgoing: Buffers, incoming: Buffers) -> None:
            before = {peer: data.clone() for peer, data in incoming.items()}
            world.exchange(outgoing, incoming)
            calls.append(1)
            for peer, data in incoming.items() if len(calls) > step else ():
                came = data.clone()
                if (peer, world.rank) not in changed and (seed + peer) % 2:  # an error shows ten links
                    FAULTS[(seed + peer + world.rank) % len(FAULTS)](random, data, before[peer])
                if not torch.equal(data, came):
                    changed.add((peer, world.rank))

        tree, target = (trees[world.rank] if world.rank < len(trees) else None for trees in (way.source, way.target))
        return run(tree, target, world=world, transport=faulty, verify=True, **way.options)

    for error in failures(on_rank, max(len(way.source), len(way.target))):
        assert isinstance(error, IntegrityError) == bool(changed), error
        found = re.findall(r"rank (\d+) → rank (\d+): '", str(error))
        assert {(int(one), int(other)) for one, other in found} == changed
    return len(changed)


def unverified(*trees: Any, verify: bool, **options: Any) -> Any:
    """The planted fault: the transport is believed."""
    return redistribute(*trees, **options)


def check_many(faults: int, run: Callable[..., Any] = redistribute) -> None:
    """Raise unless so many faults that change bytes are found."""
    names, planted, seed = list(WAYS), 0, 0
    while planted < faults:
        planted, seed = planted + check_found(names[seed % len(names)], seed, run), seed + 1
    assert seed < 2 * faults, "faults that change nothing"


@pytest.mark.slow
def test_what_a_transport_does_to_bytes_is_found() -> None:
    check_many(100)


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
def test_what_a_transport_does_to_bytes_is_found_a_hundred_thousand_times() -> None:
    check_many(100_000)


def test_the_law_catches_a_transport_that_is_believed() -> None:
    with pytest.raises(AssertionError):
        check_many(20, unverified)


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
        assert "rank 0 → rank 4: 'w' [0:2, 2:4]" in str(error)
        assert "rank 2 → rank 4: 'w' [4:6, 2:4]" in str(error)
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
    monkeypatch.setattr("shardtree.live._proof._xxh3", None)
    assert told(False) == [None] * 5
    for error in told(True):
        assert isinstance(error, RemoteError) and error.phase == "redistribute: compare sums"


# The numbers of messages: sums where a device holds them on any rank, else hashes.


def test_all_ranks_take_the_same_numbers() -> None:
    assert [hash_for(kinds) for kinds in (["cpu", "cuda"], ["cuda"], ["cpu", "cpu"])] == [bytes_total] * 2 + [_xxh3]


@pytest.mark.slow
def test_sums_in_place_of_hashes_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardtree.live._redistribute.hash_for", lambda devices: bytes_total)
    check_many(100)


@pytest.mark.parametrize("number", [bytes_total, _xxh3])
@given(size=st.integers(0, 30_000), begin=st.integers(0, 9), random=st.randoms(use_true_random=False))
def test_each_byte_and_its_place_counts_and_memory_does_not(
    number: Callable[[torch.Tensor], int], size: int, begin: int, random: Random
) -> None:
    memory = random_bits((size + begin + 8,), torch.uint8, random.randrange(1000))
    data = memory[begin : begin + size]
    total = number(data)
    assert total == number(data.clone())
    if size:
        place = random.randrange(size)
        changed = data.clone()
        changed[place] ^= 1 << random.randrange(8)
        assert number(changed) != total
        rolled = data.roll(place)
        assert (number(rolled) == total) == torch.equal(rolled, data)


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
        assert isinstance(error, IntegrityError) and "rank 0 → rank 1: 'a' [0:4]" in str(error)
    for error in failures(partial(on_rank, keys=("a", "b"), lost=False), 2):
        assert isinstance(error, RemoteError) and (error.phase, list(error.failures)) == ("redistribute: join", [1])
    assert failures(partial(on_rank, keys=("a",), lost=False), 2) == [None, None]
