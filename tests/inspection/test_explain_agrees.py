"""explain's verdict is load's: of random checkpoints, for targets good and bad, on one to three ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

import shardtree as st
from shardtree.inspection import _explanation
from shardtree.plans import Unexpected
from shardtree.shell.checkpoint.loading import ObjectsFit, Omissions, _check, prospect
from shardtree.storage import MemoryStorage
from shardtree.trees import flatten_with_paths
from tests.inspection.test_explain import payload
from tests.options import load_keywords
from tests.shell.checkpoint.parts import counted

Explain = Callable[..., st.plans.Explanation]


class Moments(NamedTuple):
    """A namedtuple, stored as a record."""

    first: Any
    second: Any


SHAPES = {"a": (6, 2), "b": (6,), "c": (), "n": (12,)}
DTYPES = {"n": torch.int64}
OBJECT = "rng"
NAMES = (*SHAPES, OBJECT)
BUFFER = torch.zeros(64)
PLACES: tuple[Callable[[Any], Any], ...] = (
    lambda leaf: leaf,
    lambda leaf: [leaf],
    lambda leaf: [leaf, 7],
    lambda leaf: (leaf, [1]),
    lambda leaf: {"x": leaf, "lr": 0.1},
    lambda leaf: Moments(leaf, 2),
    lambda leaf: {"x": {"y": [leaf]}},
)
"""Where a leaf stands, beside what."""


@dataclass(frozen=True)
class Case:
    """What is loaded, from where, and how."""

    folder: MemoryStorage
    trees: Sequence[Any]
    options: Mapping[str, Any]


# Targets: right ones, and what is done to them.


def whole(key: str, **fields: Any) -> Any:
    if key == OBJECT:
        return [st.ShardedObject(key, cell, (2,), (cell,), **fields) for cell in range(2)]
    return st.ShardedTensor.from_rank_offsets(key, torch.ones(SHAPES[key], dtype=DTYPES.get(key)), **fields)


def part(key: str, rank: int, ranks: int) -> Any:
    """What one of several ranks holds of a tensor: its rows, where they can be cut, else a replica."""
    shape = SHAPES.get(key, ())
    if not shape or shape[0] % ranks:
        return whole(key, replica_id=rank)
    rows = torch.empty(shape[0] // ranks, *shape[1:], dtype=DTYPES.get(key))
    return st.ShardedTensor.from_rank_offsets(key, rows, (0, rank, ranks))


def built(key: str, data: Any, replica_id: Any, flattened_range: Any) -> Any:
    return {"built": st.ShardedTensor.from_rank_offsets(key, data, replica_id=replica_id), "of": 1}


def broken(key: str, data: Any, replica_id: Any, flattened_range: Any) -> Any:
    raise ZeroDivisionError("it cannot be built")


def factory(build: Any) -> Callable[[Any], Any]:
    def made(leaf: Any) -> Any:
        if not isinstance(leaf, st.ShardedTensor):
            return leaf
        data = torch.zeros(leaf.global_shape, dtype=leaf.dtype)
        return st.ShardedTensorFactory(leaf.key, data, build, lambda loaded: loaded["built"], leaf.replica_id)

    return made


def longer(leaf: Any, **fields: Any) -> Any:
    if not isinstance(leaf, st.ShardedTensor) or not leaf.global_shape:
        return leaf
    shape = (leaf.global_shape[0] + 1, *leaf.global_shape[1:])
    return st.ShardedTensor.from_rank_offsets(leaf.key, torch.zeros(shape, dtype=leaf.dtype), **fields)


def of_dtype(dtype: torch.dtype) -> Callable[[Any], Any]:
    return lambda leaf: replace(leaf, data=None, dtype=dtype) if isinstance(leaf, st.ShardedTensor) else leaf


def has_data(leaf: Any) -> bool:
    return isinstance(leaf, st.ShardedTensor) and leaf.data is not None


def with_data(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Any]:
    return lambda leaf: replace(leaf, data=change(leaf.data)) if has_data(leaf) else leaf


def in_buffer(start: int) -> Callable[[Any], Any]:
    def given(leaf: Any) -> Any:
        if not has_data(leaf) or leaf.dtype != torch.float32:
            return leaf
        return replace(leaf, data=BUFFER[start:][: leaf.data.numel()].view(leaf.data_shape))

    return given


def with_key(key: str) -> Callable[[Any], Any]:
    return lambda leaf: replace(leaf, key=key)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "another key": with_key("z"),
    "a near key": with_key("module.a"),
    "a key of the common state": with_key("plain.d"),
    "another shape": longer,
    "padded": lambda leaf: longer(leaf, allow_shape_mismatch=True),
    "rounded": of_dtype(torch.bfloat16),
    "narrower": of_dtype(torch.int32),
    "wider": of_dtype(torch.float64),
    "in a buffer": in_buffer(0),
    "in a buffer, later": in_buffer(3),
    "expanded": with_data(lambda data: data[:1].expand(data.shape) if data.ndim else data),
    "meta": with_data(lambda data: data.to("meta")),
    "main": lambda leaf: replace(leaf, replica_id=0),
    "a replica": lambda leaf: replace(leaf, replica_id=1),
    "more objects": lambda leaf: st.ShardedObject(OBJECT, None, (3,), (1,)),
    "other objects": lambda leaf: st.ShardedObject("rgn", None, (1,), (0,)),
    "a factory": factory(built),
    "a broken factory": factory(broken),
    "nonpersistent": lambda leaf: st.LocalNonpersistentObject(5),
    "a plain value": lambda leaf: 5,
    "hidden in a set": lambda leaf: {leaf},
}


def changed(tree: Any, change: str) -> Any:
    """A tree with one of its leaves changed: its first."""
    # Not by map_shards, which refuses what an earlier change has hidden.
    pairs, rebuild = flatten_with_paths(tree)
    leaves = [leaf for _, leaf in pairs]
    first = next((number for number, leaf in enumerate(leaves) if isinstance(leaf, SHARDS)), None)
    return rebuild([CHANGES[change](leaf) if number == first else leaf for number, leaf in enumerate(leaves)])


SHARDS = (st.ShardedTensor, st.ShardedObject)
ROOTS: tuple[Callable[[dict[str, Any]], Any], ...] = (
    *[lambda tree: tree] * 16,
    lambda tree: [*tree.values()],
    lambda tree: tree | {"step": whole("a")},
    lambda tree: tree | {"plain": {"d": whole("b")}},
    lambda tree: tree | {"more": [st.LocalNonpersistentObject(1), whole("c")]},
    lambda tree: tree | {"deep": nested(3000)},
    lambda tree: whole("a"),
)


def nested(depth: int) -> Any:
    tree: Any = whole("a")
    for _ in range(depth):
        tree = [tree]
    return tree


@some.composite
def cases(draw: some.DrawFn) -> Case:
    stored = draw(some.sets(some.sampled_from(NAMES)))
    places = {name: draw(some.sampled_from(PLACES)) for name in NAMES}
    held: dict[str, Any] = {name: whole(name) for name in sorted(stored)}
    if "b" in held and draw(some.booleans()):
        (held["b"],) = held["b"].narrow(0, 0, 3)
    tree = {name: places[name](leaf) for name, leaf in held.items()} | {"step": 3, "plain": {"d": torch.ones(2)}}
    folder = MemoryStorage()
    st.save(tree if draw(some.integers(0, 9)) else [*tree.values()], folder, validate_access_integrity=False)
    ranks = draw(some.integers(1, 3))
    names = draw(some.lists(some.sampled_from(sorted(stored) or ["a"]), unique=True, max_size=4))
    trees: list[Any] = []
    for rank in range(ranks):
        own = {name: places[name](part(name, rank, ranks)) for name in names}
        if draw(some.integers(0, 9)) == 0 and names:
            own[names[0]] = draw(some.sampled_from(PLACES))(part(names[0], rank, ranks))
        trees.append(own)
    for change in draw(some.lists(some.sampled_from(sorted(CHANGES)), max_size=2)):
        changes_all = draw(some.booleans())
        at = draw(some.integers(0, ranks - 1))
        trees = [changed(tree, change) if changes_all or rank == at else tree for rank, tree in enumerate(trees)]
    trees = [draw(some.sampled_from(ROOTS))(tree) for tree in trees]
    return Case(folder, trees, draw(options(trees)))


MODES = [mode.value for mode in st.StrictHandling]
RULES = [
    *[None] * 9,
    {OBJECT: st.objects.drop_objects},
    {OBJECT: st.objects.redistribute_objects},
    {"gone": st.objects.drop_objects},
]


@some.composite
def options(draw: some.DrawFn, trees: Sequence[Any]) -> dict[str, Any]:
    chosen = {
        "validate_access_integrity": draw(some.booleans()),
        "strict": draw(some.sampled_from(["assume_ok_unexpected", *MODES])),
        "donate": draw(some.booleans()),
        "cast": draw(some.booleans()),
        "exchange": draw(some.sampled_from(["never", "always", "auto"])),
        "object_rules": draw(some.sampled_from(RULES)),
        "verify": draw(some.sampled_from(["whole", "all", None])),
        "types": draw(some.sampled_from([(), (Moments,)])),
    }
    if draw(some.integers(0, 4)) == 0:
        chosen["layout"] = known(trees[: draw(some.integers(1, 3))])
    return chosen


def known(trees: Sequence[Any]) -> Any:
    """The columns of all ranks' shards; none where the ranks don't agree, or there is no telling."""
    try:
        return st.layouts.join_columns([st.core.layouts.tree_columns(tree, rank) for rank, tree in enumerate(trees)])
    except Exception:
        return None


# The law.


def outcome(case: Case) -> bool:
    """Whether a load succeeds on every rank."""
    try:
        st.simulate(
            len(case.trees),
            lambda world: st.load(case.trees[world.rank], case.folder, world=world, **load_keywords(**case.options)),
        )
    except (st.CheckpointingException, ZeroDivisionError):
        return False
    return True


def disagreement(case: Case, explain: Explain) -> str:
    """How a verdict differs from what becomes of the load; nothing where it doesn't."""
    watched = counted(case.folder)
    found = explain(case.trees, watched, **load_keywords(**case.options))
    if payload(watched.counts, case.folder):
        return f"data was read: {watched.counts}"
    if found.ok is None:
        return "" if found.undecided else "nothing is undecided"
    loads = outcome(case)
    return "" if found.ok == loads else f"the load {'succeeds' if loads else 'fails'}:\n{found}"


@pytest.mark.slow
@settings(max_examples=150)
@given(cases())
@pytest.mark.filterwarnings("ignore")
def test_the_verdict_is_what_becomes_of_the_load(case: Case) -> None:
    assert not disagreement(case, st.explain_ranks)


def skipping(name: str, piece: Callable[..., Any]) -> Explain:
    """A planted fault: explain has something else in the place of one of its checks."""

    def explain(*args: Any, **options: Any) -> st.plans.Explanation:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_explanation, name, piece)
            return st.explain_ranks(*args, **load_keywords(**options))

    return explain


def reads_all(*args: Any, **options: Any) -> st.plans.Explanation:
    """A planted fault: data is read."""
    st.load({"a": whole("a")}, args[1])
    return st.explain_ranks(*args, **load_keywords(**options))


def case(*trees: Any, **options: Any) -> Case:
    folder = MemoryStorage()
    large = st.ShardedTensor.from_rank_offsets("n", torch.full((12,), 2**40))
    st.save({"a": whole("a"), "b": whole("b"), "c": whole("c"), "n": large, "step": 3}, folder)
    return Case(folder, trees, options)


FAULTS: dict[str, tuple[Explain, Case]] = {
    "targets are not compared": (
        skipping("check_alike", lambda *_, **options: None),
        case({"a": whole("a")}, {"a": whole("a")}),
    ),
    "keys are not compared": (
        skipping("refuse_keys", lambda *_: None),
        case({"a": whole("a")}, strict="raise_all"),
    ),
    "what is not stored stays": (
        skipping("leave_out", lambda target, *_: target),
        case({"a": whole("a"), "x": with_key("z")(whole("b"))}, strict="ignore_all"),
    ),
    "plain tensors ask for nothing": (
        skipping("asking_whole", lambda target, _: target),
        case({"a": torch.zeros(SHAPES["a"])}),
    ),
    "tensors are not looked at": (
        skipping("prospect", lambda *args, **options: replace(prospect(*args, **options), problems=())),
        case({"a": longer(whole("a"))}),
    ),
    "objects are not looked at": (
        skipping("fit_objects", lambda *_: ObjectsFit()),
        case({"a": whole("a")}, object_rules={"gone": st.objects.drop_objects}),
    ),
    "the join is skipped": (
        skipping("join_common", lambda *_: (None, Omissions())),
        case({"step": whole("c")}),
    ),
    "memory is not looked at": (
        skipping("check_tensors", lambda *_, **options: None),
        case({"a": CHANGES["expanded"](whole("a"))}, donate=True),
    ),
    "targets are looked at one by one": (
        lambda trees, *args, **options: st.explain(trees[0], *args, **load_keywords(**options)),
        case({"a": whole("a")}, {"a": with_key("z")(whole("a"))}),
    ),
    "data is read": (reads_all, case({"a": whole("a")})),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.filterwarnings("ignore")
def test_the_law_catches(fault: str) -> None:
    explain, caught = FAULTS[fault]
    assert not disagreement(caught, st.explain_ranks)
    assert disagreement(caught, explain)


INSTEAD = {
    "check_together": {"check_alike"},  # which doesn't hold all ranks' shards at once
    "settle_keys": {"refuse_keys"},  # nothing is logged
    "fit_target": {"prospect", "fit_objects"},  # with costs
    "destination_of": {"check_tensors"},  # without memory
    "exchange_choice": {"foretold_exchange"},  # ranks' places aren't known
    "bytes_wanted_twice": set(),  # foretold_exchange calls it
}
"""What explain calls in the place of a piece of the load's check."""


def called(*functions: Callable[..., Any]) -> set[str]:
    """The functions of shardtree, by name, that some of a module's functions name."""
    pairs = [(name, function.__globals__.get(name)) for function in functions for name in function.__code__.co_names]
    things = {name: thing for name, thing in pairs if isinstance(thing, FunctionType)}
    return {name for name, thing in things.items() if thing.__module__.startswith("shardtree.")}


def forgotten(*functions: Callable[..., Any]) -> set[str]:
    """The pieces of a load's check that explain doesn't call."""
    own = _explanation
    explains = called(own.explanation, own._prepare, own._check, own._Load.prospect, own._differing_keys)
    pieces = called(*functions) - {"fetch_checked", "unless_replaced", "log_omissions"}
    return {piece for name in pieces for piece in INSTEAD.get(name, {name})} - explains


def test_explain_calls_every_piece_of_a_loads_check() -> None:
    assert forgotten(_check.check) == set()


def test_a_piece_that_explain_lacks_is_found() -> None:
    assert forgotten(_check.check_ranks) >= {"log_of_ranks"}


# What is said.


def test_every_rank_that_fails_is_named_with_what_load_would_raise() -> None:
    wrong = {"step": whole("c", replica_id=1)}
    found = explained(case({"a": whole("a")}, wrong, wrong, validate_access_integrity=False))
    (failed,) = found.failed
    assert (failed.ranks, failed.error, found.ok) == ((1, 2), st.errors.TreeError, False)
    assert "ranks 1, 2: TreeError: join: target['step'] does not fit common['step']" in str(found)


def explained(case: Case) -> st.plans.Explanation:
    return st.explain_ranks(case.trees, case.folder, **load_keywords(**case.options))


def test_all_that_is_wrong_is_told_at_once() -> None:
    target = {"step": whole("c"), "a": longer(whole("a")), "b": with_key("z")(whole("b")), "n": factory(built)(5)}
    found = explained(case(target, strict="raise_all"))
    assert [type(one).__name__ for one in found.problems] == ["Unexpected", "Mismatch", "FailedCheck", "FailedCheck"]
    assert [one.error for one in found.failed] == [st.errors.KeyMismatch, st.errors.TreeError]
    assert found.missing == ("b", "n")


def test_where_values_decide_the_verdict_is_none_and_says_why() -> None:
    found = explained(case({"n": of_dtype(torch.int32)(whole("n")), "a": whole("a")}, cast=True))
    assert found.ok is None and not found.problems
    assert [str(one) for one in found.undecided] == ["'n': whether its values, stored as torch.int64, fit torch.int32"]
    assert "as far as can be told" in str(found) and "1 open question:" in str(found)
    assert explained(case({"a": of_dtype(torch.bfloat16)(whole("a"))}, cast=True)).ok is True


def test_what_a_strict_mode_leaves_out_is_no_problem() -> None:
    found = explained(case({"a": whole("a"), "x": with_key("aa")(whole("b"))}, strict="return_all"))
    assert found.ok is True and found.unexpected == found.omitted == (Unexpected("aa"),)
    assert "asked for, not stored, left out: 'aa'" in str(found)


def test_a_target_that_can_not_be_taken_apart_is_explained() -> None:
    found = explained(case({"a": factory(broken)(whole("a"))}, whole("a"), strict="raise_all"))
    assert {one.error for one in found.failed} == {ZeroDivisionError, st.errors.TreeError}
    assert [one.cost for one in found.reads] == [None, None]


def test_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    explained(case({"x": with_key("z")(whole("a"))}, strict="log_all"))
    assert not caplog.records
