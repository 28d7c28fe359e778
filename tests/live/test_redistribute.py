"""Laws of live resharding on simulated ranks: it gives what a reshard in memory gives, and moves what the plan says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardtree
from shardtree import (
    LocalNonpersistentObject,
    ReshardPlan,
    ShardedObject,
    ShardedTensor,
    World,
    map_shards,
    plan_reshard,
    redistribute,
    reshard,
    simulate,
)
from shardtree.core.layouts import select_rows, tree_columns
from shardtree.errors import (
    RemoteError,
    ShapeError,
    WorldError,
)
from shardtree.plans import with_relays
from shardtree.testing import (
    GlobalState,
    assemble,
    bits,
    check_pure,
    glu,
    outline,
    random_bits,
    rank_tree,
    state_layouts,
    target_tree,
)
from tests.live.recast import recast_states
from tests.shell.world.passing_on import PassingOn

# What torch says, once, when it makes a tensor of half-precision complex numbers.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

EXAMPLES = settings.default.max_examples if settings.default else 100
RANKS = 5
Trees = Mapping[int, Any]
Links = Counter[tuple[int, int]]


@dataclass(frozen=True)
class Case:
    """Trees of some ranks of a world, and what other ranks, or some of the same, want of them: that is the state."""

    state: GlobalState
    sources: Trees
    targets: Trees
    bound: int


@st.composite
def groups(draw: st.DrawFn) -> list[int]:
    return draw(st.lists(st.integers(0, RANKS - 1), min_size=1, max_size=4, unique=True))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    held, state = draw(recast_states())
    givers, takers = draw(groups()), draw(groups())
    before, after = (draw(state_layouts(state, len(group))) for group in (givers, takers))
    sources = {rank: rank_tree(held, before, number) for number, rank in enumerate(givers)}
    targets = {rank: target_tree(state, after, number) for number, rank in enumerate(takers)}
    return Case(state, sources, targets, draw(st.integers(16, 200)))


def counting(world: World, links: Links, bound: int) -> Callable[..., None]:
    """Return the world's exchange, which notes the bytes on each link and holds the bound."""

    def exchange(outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> None:
        buffers = [*outgoing.values(), *incoming.values()]
        assert sum(buffer.numel() for buffer in buffers) <= bound
        assert all(buffer.numel() for buffer in buffers)
        for to, data in outgoing.items():
            links[world.rank, to] += data.numel()
        world.exchange(outgoing, incoming)

    return exchange


Run = Callable[..., Any]


def check_redistribute(
    case: Case,
    *,
    run: Run = redistribute,
    make: Callable[[Any], Any] = lambda tree: tree,
    is_seen: bool = True,
    **options: Any,
) -> None:
    """Raise unless every rank gets what a reshard in memory gives it, and what crossed is what the plan says.

    Where nobody sees what crosses, messages may be the shards' own memory.
    """
    links: Links = Counter()
    expected = reshard(case.sources, case.targets, cast=True)

    def on_rank(world: World) -> Any:
        exchange = counting(world, links, case.bound)
        tree, target = case.sources.get(world.rank, {}), make(case.targets.get(world.rank))
        bounded = {"max_bytes_in_flight": case.bound} | ({"transport": exchange} if is_seen else {})
        return run(tree, target, world=world, cast=True, **bounded, **options)

    got = simulate(RANKS, on_rank)
    assert [rank for rank, tree in enumerate(got) if tree is None] == sorted({*range(RANKS)} - {*case.targets})
    for rank, tree in expected.items():
        assert outline(got[rank]) == outline(tree), f"rank {rank}"
    for key, whole in assemble([got[rank] for rank in expected]).items():
        assert bits(whole) == bits(case.state.tensors[key])
    plan = options.get("plan", plan_reshard(case.sources, case.targets, cast=True))
    plan = with_relays(plan) if options.get("relay") else plan
    assert not is_seen or dict(links) == plan.links


@pytest.mark.slow
@given(cases(), st.booleans())
def test_a_live_reshard_gives_what_one_in_memory_gives(case: Case, is_seen: bool) -> None:
    check_redistribute(case, is_seen=is_seen)


@pytest.mark.slow
@settings(max_examples=EXAMPLES // 2)
@given(cases(), st.booleans())
def test_a_relayed_one_gives_the_same(case: Case, is_seen: bool) -> None:
    check_redistribute(case, relay=True, is_seen=is_seen)


@pytest.mark.slow
@settings(max_examples=EXAMPLES // 3)
@given(cases(), st.booleans())
def test_with_a_plan_it_gives_the_same(case: Case, relay: bool) -> None:
    # Computed layouts have rows in another order than trees have leaves.
    before, after = (
        select_rows(columns, np.arange(len(columns))[::-1])
        for columns in (tree_columns(case.sources), tree_columns(case.targets))
    )
    check_redistribute(case, plan=plan_reshard(before, after, cast=True), relay=relay)


def strided(tree: Any) -> Any:
    """Return a tree whose shards have memory of their own, which isn't contiguous where that is possible."""
    return None if tree is None else map_shards(_strided, tree)


def _strided(leaf: Any) -> Any:
    if not isinstance(leaf, ShardedTensor):
        return leaf
    axes: list[Any] = list(range(len(leaf.data_shape)))[::-1] or [[]]
    return leaf.init_data("cpu", lambda shape, dtype, device: random_bits(shape[::-1], dtype, 5).permute(*axes))


@pytest.mark.slow
@pytest.mark.parametrize("donate", [False, True])
@settings(max_examples=EXAMPLES // 3)
@given(cases())
def test_targets_may_have_memory_of_any_strides(donate: bool, case: Case) -> None:
    check_redistribute(case, make=strided, donate=donate)


def damaging(tree: Any, target: Any, *, transport: Callable[..., None], **options: Any) -> Any:
    """The planted fault: a transport that turns bytes round."""

    def broken(outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> None:
        transport({to: data.flip(0) for to, data in outgoing.items()}, incoming)

    return redistribute(tree, target, transport=broken, **options)


def sending_twice(tree: Any, target: Any, **options: Any) -> Any:
    """The planted fault: twice as much crosses as has to."""
    redistribute(tree, target, **options)
    return redistribute(tree, target, **options)


WHOLE = torch.arange(24.0).view(6, 4)


def rows(rank: int, ranks: int, **fields: Any) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets("w", WHOLE.chunk(ranks)[rank], (0, rank, ranks), **fields)


def columns(rank: int, ranks: int, data: torch.Tensor | None = None) -> ShardedTensor:
    shard = ShardedTensor.from_rank_offsets("w", WHOLE.chunk(ranks, 1)[rank], (1, rank, ranks))
    return replace(shard, data=data)


def example() -> Case:
    sources = {rank: {"w": rows(rank, 3), "step": 3} for rank in range(3)}
    targets = {rank + 3: {"w": columns(rank, 2)} for rank in range(2)}
    return Case(GlobalState({"w": WHOLE}, {}, {"step": 3}), sources, targets, 32)


@pytest.mark.parametrize("fault", [damaging, sending_twice])
def test_the_law_catches(fault: Run) -> None:
    check_redistribute(example())
    with pytest.raises(AssertionError):
        check_redistribute(example(), run=fault)


def test_no_argument_is_changed() -> None:
    case = example()

    def on_rank(world: World) -> Any:
        tree, target = case.sources.get(world.rank), case.targets.get(world.rank)
        return check_pure(partial(redistribute, world=world), tree, target)

    simulate(RANKS, on_rank)


def test_a_donated_tensor_keeps_its_place_and_autograd_knows() -> None:
    def on_rank(world: World) -> None:
        parameter = torch.nn.Parameter(torch.zeros(6, 2))
        before = parameter._version
        target = None if world.rank == 0 else {"w": columns(world.rank - 1, 2, parameter)}
        source = {"w": rows(0, 1)} if world.rank == 0 else {}
        tree = redistribute(source, target, world=world, donate=True)
        if world.rank > 0:
            assert tree["w"].data is parameter
            assert torch.equal(parameter.detach(), WHOLE.chunk(2, 1)[world.rank - 1])
            assert parameter._version > before

    simulate(3, on_rank)


@pytest.mark.parametrize("relay", [False, True])
def test_shards_of_one_rank_that_want_the_same_all_get_it(relay: bool) -> None:
    whole = ShardedTensor.from_rank_offsets("w", WHOLE)
    rows = ShardedTensor.from_rank_offsets("w", WHOLE.chunk(2)[1], (0, 1, 2), replica_id=1)
    target = {"w": whole.without_data(), "rows": rows.without_data(), "again": whole.without_data()}

    def on_rank(world: World) -> Any:
        return redistribute(*(({"w": whole}, None) if world.rank == 0 else (None, target)), world=world, relay=relay)

    for got in simulate(3, on_rank)[1:]:
        assert torch.equal(got["w"].data, WHOLE) and torch.equal(got["again"].data, WHOLE)
        assert torch.equal(got["rows"].data, WHOLE.chunk(2)[1])


def test_objects_and_local_values_go_along() -> None:
    def on_rank(world: World) -> Any:
        seen = ShardedObject("seen", [world.rank], (2,), (world.rank % 2,))
        if world.rank < 2:
            return redistribute({"seen": seen, "lr": [0.1, 0.2]}, None, world=world)
        target = {"seen": replace(seen, data=None), "own": LocalNonpersistentObject(world.rank), "lr": "ignored"}
        return redistribute(None, target, world=world)

    got = simulate(4, on_rank)
    assert got[:2] == [None, None]
    assert [tree["seen"].data for tree in got[2:]] == [[0], [1]]
    assert [tree["own"].unwrap() for tree in got[2:]] == [2, 3]
    assert [tree["lr"] for tree in got[2:]] == [[0.1, 0.2]] * 2


def test_objects_in_another_shape_follow_a_rule() -> None:
    def on_rank(world: World) -> Any:
        source = {"seen": ShardedObject("seen", [world.rank], (2,), (world.rank,))} if world.rank < 2 else {}
        target = {"seen": ShardedObject("seen", None, (1,), (0,))} if world.rank == 2 else None
        return redistribute(source, target, world=world, rules={"seen": shardtree.objects.concatenate_objects})

    assert simulate(3, on_rank)[2]["seen"].data == [0, 1]


@pytest.mark.parametrize(("room", "is_direct"), [(torch.zeros(6, 4), True), (torch.zeros(6, 8)[:, ::2], False)])
def test_messages_are_shards_own_memory_where_that_is_consecutive(room: torch.Tensor, is_direct: bool) -> None:
    addresses: dict[int, int] = {}

    class Seeing(PassingOn):
        def exchange(self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> None:
            addresses[self.rank] = next(iter((outgoing or incoming).values())).data_ptr()
            self.inner.exchange(outgoing, incoming)

    ends = ([rows(0, 1)], None), (None, [replace(rows(0, 1), data=room)])
    simulate(2, lambda world: redistribute(*ends[world.rank], world=Seeing(world), donate=True))
    assert torch.equal(room, WHOLE)
    assert (addresses[0], addresses[1] == room.data_ptr()) == (WHOLE.data_ptr(), is_direct)


def test_nothing_to_move_is_no_step() -> None:
    def on_rank(world: World) -> Any:
        def exchange(outgoing: Any, incoming: Any) -> None:
            raise AssertionError

        mine = {"w": rows(world.rank, 2)}
        return redistribute(mine, mine, world=world, transport=exchange)["w"].data

    for rank, data in enumerate(simulate(2, on_rank)):
        assert torch.equal(data, WHOLE.chunk(2)[rank])


def failures(fn: Callable[[World], Any], size: int = RANKS) -> list[BaseException | None]:
    """Return what each rank raises."""

    def on_rank(world: World) -> BaseException | None:
        try:
            fn(world)
        except Exception as error:
            return error
        return None

    return simulate(size, on_rank)


def plan_of(case: Case) -> ReshardPlan:
    return plan_reshard(case.sources, case.targets)


Spoil = Callable[[Case, int], dict[str, Any]]
"""What a rank passes otherwise than it should."""

IN_ANOTHER_STORAGE = torch.from_numpy(WHOLE.view(-1).numpy()[1:13]).view(6, 2)

SPOILT: dict[str, tuple[Spoil, str, str]] = {
    "no tree": (lambda case, rank: {"tree": 3}, "prepare", "not a tree"),
    "a shard without data": (lambda case, rank: {"tree": {"w": replace(rows(0, 3), data=None)}}, "prepare", "'w'"),
    "a shard whose tensor was freed": (lambda case, rank: {"tree": {"w": freed(rows(0, 3))}}, "prepare", ", freed"),
    "a target whose tensor was freed": (
        lambda case, rank: {"target": {"w": freed(columns(0, 2, torch.zeros(6, 2)))}, "donate": True},
        "make memory",
        ", freed",
    ),
    "a source that is given away in another storage": (
        lambda case, rank: {"target": {"w": columns(0, 2, IN_ANOTHER_STORAGE)}, "donate": True},
        "make memory",
        "which is read",
    ),
    "buffers that there is no memory for": (
        lambda case, rank: {"empty": no_room},
        "make memory",
        "cannot allocate buffers",
    ),
}


def no_room(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    if dtype == torch.uint8:
        raise RuntimeError("not enough memory")
    return torch.empty(shape, dtype=dtype, device=device)


def freed(shard: ShardedTensor) -> ShardedTensor:
    shard = replace(shard, data=torch.zeros_like(shard.data))
    shard.data.untyped_storage().resize_(0)
    return shard


def check_all_hear(fault: str, run: Run = redistribute) -> None:
    spoil, phase, text = SPOILT[fault]
    case, moved = example(), []

    def on_rank(world: World) -> Any:
        normal = {
            "tree": case.sources.get(world.rank, {}),
            "target": {"w": columns(0, 2)} if world.rank in (0, 3) else None,
            "transport": lambda outgoing, incoming: moved.append(world.rank),
        }
        return run(**(normal | (spoil(case, 0) if world.rank == 0 else {})), world=world)

    for error in failures(on_rank):
        assert isinstance(error, RemoteError)
        assert (error.phase, list(error.failures)) == (f"redistribute: {phase}", [0])
        assert text in error.failures[0]
    assert moved == []


@pytest.mark.parametrize("fault", SPOILT)
def test_what_fails_on_one_rank_before_bytes_move_fails_on_all(fault: str) -> None:
    check_all_hear(fault)


def trying_first(*, transport: Any, **options: Any) -> Any:
    """The planted fault: bytes move before it is known that all can take part."""
    transport({}, {})
    return redistribute(transport=transport, **options)


def test_the_law_of_failures_catches_one_that_is_found_late() -> None:
    with pytest.raises(AssertionError):
        check_all_hear("no tree", trying_first)


def test_another_plan_on_one_rank_is_an_error_on_all() -> None:
    case = example()
    plan = plan_of(case)
    other = plan_of(replace(case, targets={3: {"w": columns(1, 2)}, 4: {"w": columns(0, 2)}}))

    def on_rank(world: World, **own: Any) -> Any:
        tree, target = case.sources.get(world.rank, {}), case.targets.get(world.rank)
        return redistribute(tree, target, world=world, **(own if world.rank == 2 else {"plan": plan}))

    for own in ({"plan": other}, {"plan": None}, {"plan": plan, "relay": True}):
        for error in failures(partial(on_rank, **own)):
            assert isinstance(error, WorldError)
            assert "ranks disagree about" in str(error)
    assert failures(partial(on_rank, plan=plan_of(example()))) == [None] * RANKS


def test_an_exchange_that_fails_says_in_which_step() -> None:
    case = example()

    def exchange(outgoing: Any, incoming: Any) -> None:
        raise OSError("the link is down")

    def on_rank(world: World) -> Any:
        tree, target = case.sources.get(world.rank, {}), case.targets.get(world.rank)
        return redistribute(tree, target, world=world, transport=exchange, max_bytes_in_flight=8)

    for error in failures(on_rank):
        assert isinstance(error, OSError)
        assert error.__notes__ == ["redistribute: in the exchange of step 1 of 6"]


def test_a_tree_that_the_plan_doesnt_know_is_an_error_on_all() -> None:
    case = example()
    plan = plan_of(case)

    def on_rank(world: World, wrong: Any) -> Any:
        tree, target = case.sources.get(world.rank, {}), case.targets.get(world.rank)
        return redistribute(wrong if world.rank == 1 else tree, target, plan=plan, world=world)

    wide = replace(rows(1, 3), data=rows(1, 3).data.double(), dtype=torch.float64)
    for wrong, text in (
        ({"w": rows(2, 3), "step": 3}, "only in the plan: 'w' at (2, 0) of (2, 4)"),
        ({"w": wide, "step": 3}, "the tree has (6, 4) float64, the plan (6, 4) float32"),
        ({"w": rows(1, 3), "again": rows(1, 3, replica_id=1), "step": 3}, "more often on one side than on the other"),
    ):
        for error in failures(partial(on_rank, wrong=wrong)):
            assert isinstance(error, RemoteError)
            assert "the source tree of rank 1 differs from the plan" in error.failures[1]
            assert text in error.failures[1]


def test_what_fails_while_bytes_move_lets_nobody_wait() -> None:
    """A tensor is gone when it is packed: the rank goes on to exchange, and all hear of it at the end."""
    case = example()

    def on_rank(world: World) -> Any:
        tree, target = case.sources.get(world.rank, {}), case.targets.get(world.rank)
        calls: list[int] = []

        def exchange(outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> None:
            world.exchange(outgoing, incoming)
            calls.append(len(calls))
            if world.rank == 1 and len(calls) == 1:
                mine.untyped_storage().resize_(0)
                mine.resize_(0)

        if world.rank == 1:
            mine = tree["w"].data.clone()
            tree = {"w": replace(tree["w"], data=mine), "step": 3}
        return redistribute(tree, target, world=world, max_bytes_in_flight=8, transport=exchange)

    for error in failures(on_rank):
        assert isinstance(error, RemoteError)
        assert (error.phase, list(error.failures)) == ("redistribute: join", [1])
        assert "wrong size or dtype of the tensor for 'w'" in error.failures[1]


def test_a_merge_that_fails_is_an_error_on_all() -> None:
    def refuse(loaded: Any) -> Any:
        raise ShapeError("no merge today")

    def on_rank(world: World) -> Any:
        factory = glu("mlp", torch.arange(8.0).view(4, 2))
        target = {"mlp": replace(factory, merge_fn=refuse)} if world.rank == 1 else {"mlp": factory}
        return redistribute({"mlp": factory} if world.rank == 0 else {}, target, world=world)

    for error in failures(on_rank, 2):
        assert isinstance(error, RemoteError)
        assert error.failures[1].startswith("ShapeError: no merge today")


def sizes_told(plan: bool, tensors: int) -> int:
    """Return how many bytes ranks tell each other before anything moves."""
    import pickle

    told: list[int] = []

    class Listening(PassingOn):
        def told(self, call: str, value: Any = None) -> Any:
            told.extend([len(pickle.dumps(value))] if call == "all_gather" else [])
            return value

    def keys(shard: ShardedTensor) -> dict[str, Any]:
        return {f"{number}": replace(shard, key=f"w{number}") for number in range(tensors)}

    sources = {rank: keys(rows(rank, 2)) for rank in range(2)}
    targets = {rank: keys(columns(rank, 2)) for rank in range(2)}
    made = plan_reshard(sources, targets) if plan else None
    # A world of one's own, which has no exchange but the one that every world has.
    got = simulate(2, lambda w: redistribute(sources[w.rank], targets[w.rank], plan=made, world=Listening(w)))
    assert torch.equal(torch.cat([tree["0"].data for tree in got], 1), WHOLE)
    return sum(told)


def test_with_a_plan_no_layout_is_exchanged() -> None:
    assert sizes_told(True, 200) == sizes_told(True, 1) < 4_000


def test_without_a_plan_the_count_sees_layouts() -> None:
    assert sizes_told(False, 200) > sizes_told(False, 1) + 200 * 50
