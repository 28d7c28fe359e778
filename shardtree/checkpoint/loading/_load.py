"""load: a checkpoint fills a sharded tree, in any layout, whatever layout it was saved in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar, Unpack, overload

import torch

from ...layouts import ShardColumns
from ...objects import ObjectRule
from ...storage import Directory, ReadReport, Verify
from ...strategies import LoadOptions, Strategies
from ...trees import told_of_depth
from ...world import agree, current_world, step
from .._dispatch import Choice
from .._open import load_tensors_metadata, look, open_together
from ._checks import joined
from ._read import ROOM_STEPS, Exchange, Reading, deliver, make_room, read_into
from ._settle import Settled, Wanted, settle
from ._strict import StrictHandling, returns_keys
from ._targets import Target

_Key = TypeVar("_Key")

_Returns: TypeAlias = Literal[
    StrictHandling.RETURN_UNEXPECTED, StrictHandling.RETURN_ALL, "return_unexpected", "return_all"
]
_Leaves: TypeAlias = Literal[
    StrictHandling.ASSUME_OK_UNEXPECTED,
    StrictHandling.LOG_UNEXPECTED,
    StrictHandling.LOG_ALL,
    StrictHandling.RAISE_UNEXPECTED,
    StrictHandling.RAISE_ALL,
    StrictHandling.IGNORE_ALL,
    "assume_ok_unexpected",
    "log_unexpected",
    "log_all",
    "raise_unexpected",
    "raise_all",
    "ignore_all",
]


class _Options(TypedDict, total=False):
    """What `load` takes by name alone, for type checkers."""

    world: Any
    donate: bool
    cast: bool
    device: str | torch.device | None
    exchange: Exchange
    object_rules: Mapping[str, ObjectRule] | None
    verify: Verify
    allow_pickle: bool
    types: tuple[type, ...]
    strategies: Strategies | None
    progress: Callable[[int], None] | None
    report: Callable[[ReadReport], None] | None
    layout: ShardColumns | None


@overload
def load(
    sharded_state_dict: dict[_Key, Any],
    checkpoint_dir: Directory,
    sharded_strategy: Choice = ...,
    common_strategy: Choice = ...,
    validate_access_integrity: bool = ...,
    strict: _Leaves = ...,
    **options: Unpack[_Options],
) -> dict[_Key, Any]: ...
@overload
def load(
    sharded_state_dict: dict[_Key, Any],
    checkpoint_dir: Directory,
    sharded_strategy: Choice = ...,
    common_strategy: Choice = ...,
    validate_access_integrity: bool = ...,
    strict: _Returns = ...,
    **options: Unpack[_Options],
) -> tuple[dict[_Key, Any], set[str], set[str]]: ...
@overload
def load(
    sharded_state_dict: Any,
    checkpoint_dir: Directory,
    sharded_strategy: Choice = ...,
    common_strategy: Choice = ...,
    validate_access_integrity: bool = ...,
    strict: str | StrictHandling = ...,
    **options: Unpack[_Options],
) -> Any: ...
def load(
    sharded_state_dict: Any,
    checkpoint_dir: Directory,
    sharded_strategy: Choice = None,
    common_strategy: Choice = None,
    validate_access_integrity: bool = True,
    strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
    *,
    world: Any = None,
    donate: bool = False,
    cast: bool = False,
    device: str | torch.device | None = None,
    exchange: Exchange = "auto",
    object_rules: Mapping[str, ObjectRule] | None = None,
    verify: Verify = "whole",
    allow_pickle: bool = False,
    types: tuple[type, ...] = (),
    strategies: Strategies | None = None,
    progress: Callable[[int], None] | None = None,
    report: Callable[[ReadReport], None] | None = None,
    layout: ShardColumns | None = None,
) -> Any:
    """Return the stored common state joined by the loaded target; every rank of the world calls it with its own target.

    Only the bytes that the target asks for are read. Plain values in the target are ignored. Every container of the
    target stands in the result, as `trees.join` says. Stored lists, tuples and records whose shards the target doesn't
    ask for are left out; `report` and ``strict="raise_all"`` name the plain values that go with them.

    Args:
        sharded_state_dict: the target: shards say what to load. Their data may be tensors on any device (results go
            there), None, or meta tensors (results go to `device`). It isn't changed.
        checkpoint_dir: where the checkpoint is.
        sharded_strategy: replaces the function that its format's row has for loading shards.
        common_strategy: replaces the one for the common state.
        validate_access_integrity: whether ranks exchange their targets and check that every element is asked for
            by exactly one main replica.
        strict: what to do about keys that only the target or only the checkpoint has.
        world: the ranks that take part; torch.distributed's default group, or else this process alone.
        donate: whether the target's tensors are given away: they are filled in place and returned. If the
            load fails, their content is lost.
        cast: whether what is stored in another dtype than the target's is converted, as `torch.Tensor.to` does; a
            fraction, an imaginary part or an integer that doesn't fit is an error. Without, another dtype is one.
        device: where a tensor is put whose target has no memory, since its data is None, a meta or a lazy tensor; the
            CPU by default. Each rank says its own.
        exchange: whether ranks that want the same shard read it once between them and pass it on: "always", "never",
            or "auto", which does so where storage is remote.
        object_rules: what becomes of arrays of objects that are stored in another shape than the target's, by patterns
            of keys (``*`` stands for one part between dots, ``**`` for any number); the first that fits a key counts.
            Without a rule, another shape is an error.
        verify: which blocks are checked against their hashes: "whole" those that are read whole or nearly (at most
            64 KiB missing), and in files of at most 4 MiB all that are touched; "all" touched; or none (None).
        allow_pickle: whether pickled values may be unpickled, which can run any code.
        types: enum, dataclass and namedtuple classes that stored records become instances of; in the common
            state, the namedtuple classes in the target count too.
        strategies: the dispatch table; None for the process's.
        progress: is told, now and then, how many bytes this rank read since the last time.
        report: is given what this rank read, once.
        layout: the tensor shards that all ranks ask for, as every rank computed them by itself from a mesh and specs,
            or from DTensors: then no layouts are exchanged, only a hash of this one, which is checked in any case.

    Returns:
        The tree; with a strict mode that returns keys, ``(tree, missing, unexpected)``.

    Raises:
        MetadataError: `device` isn't one that this machine has, or is the meta device.
        NotACheckpoint: there is none.
        KeyMismatch: the checkpoint lacks what the target asks for, or more than `strict` allows.
        TreeError: the target doesn't fit the common state, or is too deep; a rule for objects fits no key.
        UnsupportedValue: a shard is hidden in a value of the target that isn't entered; a rule can't handle an object.
        ShapeError: a tensor's global shape or dtype differs, the checkpoint doesn't cover the target, a stored value
            can't be converted, donated tensors share memory, or objects of another shape have no rule.
        IntegrityError: elements don't have one main replica each, or `layout` isn't what the ranks ask for, or not the
            same on all.
        CorruptCheckpoint: stored bytes aren't what was saved.
        UnsafeFile: it holds pickled values, and `allow_pickle` isn't given.
        RemoteError: on every rank where one of several failed; also of the class above that the failures share.

    Examples:
        >>> import tempfile, torch, shardtree as st
        >>> folder = tempfile.mkdtemp()
        >>> st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.arange(4)), "step": 7}, folder)
        >>> half = st.ShardedTensor.from_rank_offsets("w", torch.zeros(2, dtype=torch.int64), (0, 1, 2))
        >>> st.load({"w": half}, folder, validate_access_integrity=False)
        {'w': tensor([2, 3]), 'step': 7}

    References:
        megatron.core.dist_checkpointing.serialization.load, megatron-core 0.16.1.
    """
    ranks = current_world(world)
    options = LoadOptions(verify, allow_pickle, types, progress or LoadOptions().progress)
    choices = (sharded_strategy, common_strategy, strategies)
    wanted = Wanted(
        sharded_state_dict, layout, strict, validate_access_integrity, cast, object_rules, donate, exchange, device
    )
    settled = settle(ranks, partial(look, checkpoint_dir, ranks, options, strategies), wanted, choices)
    objects, read = read_into(settled.reading, settled.room)
    tree = agree(ranks, "load: report", partial(_finished, settled, objects, read, report), steps=_LAST_STEPS)
    return (tree, settled.missing, settled.unexpected) if returns_keys(settled.mode) else tree


_LAST_STEPS = ("load: deliver", "load: join")


def _finished(
    settled: Settled, objects: Sequence[Any], read: ReadReport, report: Callable[[ReadReport], None] | None
) -> Any:
    loaded = step("load: deliver", partial(deliver, settled.reading, settled.room, objects))
    tree = step("load: join", partial(_joined, settled.common, settled.target, loaded))
    if report is not None:
        report(replace(read, left_out=settled.left_out))
    return tree


def _joined(common: Any, target: Target, loaded: Sequence[Any]) -> Any:
    with told_of_depth("load"):
        # Factories merge last, so that they see the plain values that they built beside their shards.
        return target.merge(joined(common, target, loaded))


def load_plain_tensors(
    checkpoint_dir: Directory,
    *,
    world: Any = None,
    verify: Verify = "whole",
    strategies: Strategies | None = None,
) -> dict[str, torch.Tensor]:
    """Return every stored tensor whole, by key; each rank of the world reads all of them.

    Examples:
        >>> import tempfile, torch, shardtree as st
        >>> folder = tempfile.mkdtemp()
        >>> st.save({"model": [st.ShardedTensor.from_rank_offsets("w", torch.arange(3))], "step": 7}, folder)
        >>> st.load_plain_tensors(folder)
        {'w': tensor([0, 1, 2])}
    """
    ranks = current_world(world)
    target = agree(ranks, "load: metadata", partial(load_tensors_metadata, checkpoint_dir, strategies=strategies))
    checkpoint = open_together(checkpoint_dir, ranks, LoadOptions(verify), strategies)
    reading = Reading(checkpoint, None, strategies)
    room = agree(ranks, "load: exchange", partial(make_room, reading, list(target.values())), steps=ROOM_STEPS[:-1])
    objects, _ = read_into(reading, room)
    loaded = agree(ranks, "load: deliver", partial(deliver, reading, room, objects))
    return dict(zip(target, loaded, strict=True))
