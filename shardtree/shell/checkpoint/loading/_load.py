"""load: a checkpoint fills a sharded tree, in any layout, whatever layout it was saved in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ....core.ambient import shielded
from ....core.layouts import ShardColumns
from ....core.trees import refuse_too_deep, target_through
from ....errors import TreeError
from ...storage import Directory, ReadReport
from ...table import Checkpoint, LoadOptions, Strategies
from ...world import agree, current_world, step, tried
from .._dispatch import Choice
from .._open import open_alone
from ._ask import LoadRequest, ask, compare_keys, with_metadata
from ._check import CheckedLoad, check_ranks
from ._omissions import join_leaves
from ._read import deliver, read_into
from ._strict import RETURNING, StrictHandling


@shielded
def load(
    sharded_state_dict: Any,
    checkpoint_dir: Directory | Checkpoint,
    sharded_strategy: Choice = None,
    common_strategy: Choice = None,
    validate_access_integrity: bool = True,
    strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
    *,
    world: Any = None,
    donate: bool = False,
    cast: bool = False,
    plain: Sequence[str] = (),
    device: str | torch.device | None = None,
    layout: ShardColumns | None = None,
    transform: Any = None,
    strategies: Strategies | None = None,
    options: LoadOptions | None = None,
) -> Any:
    """Return the stored common state merged with the loaded target; every rank calls it with its own target.

    Only the bytes that the target asks for are read. A plain tensor in the target asks for the whole stored tensor
    whose key is its path, joined by dots, on each rank that has it; where no tensor has that key, the common state's
    value is in its place. A plain tensor for which nothing is stored isn't in the result; a warning and the report name
    it. Other plain values in the target are ignored. The result keeps all containers of the target, as `trees.join`
    says. Stored lists, tuples and records whose shards the target doesn't ask for are left out, and so are keys that
    only some ranks had and that no rank's target names; the report and ``strict="raise_all"`` name the plain values
    that go with them. The steps:

    1. Open: rank 0 reads metadata.json. No collective; if it fails, ranks learn of it in the next step.
    2. Ask: ranks take their targets apart and exchange descriptions of them. One collective, two for many ranks. Then
       the metadata is completed: usually no collective; one where rank 0 parses a format's metadata for all, and one or
       three more where metadata doesn't say it all.
    3. Find missing and unexpected keys, where `strict` asks for it: one or two collectives, in the default mode none.
    4. Check: targets fit together and what is stored, the common state is read, memory is made. One collective; no
       tensor of the target was filled before.
    5. Read: only what is asked for. One collective; more where one rank reads for several.
    6. Put together: what donated tensors lack is written, leaves join the common state, factories merge, the report is
       made. One collective.

    Args:
        sharded_state_dict: The target: shards say what to load. Their data may be tensors on any device (results go
            there), None, or meta tensors (results go to `device`). It isn't changed.
        checkpoint_dir: Directory, URL or `Storage` of the checkpoint; or the `checkpoint` of an open one, which isn't
            opened again if `options` are the same.
        sharded_strategy: Replacement of the function by which its format loads shards: a function, or the
            name or the (backend, version) whose row is used.
        common_strategy: Replacement of the one for the common state.
        validate_access_integrity: Whether ranks exchange their targets and check that every element is asked for
            by exactly one main replica.
        strict: Mode for keys that only the target or only the checkpoint has. What a mode leaves out isn't in
            dicts; in a list, tuple or instance of a class, as in a field that it has got since, the target's own value
            stays, and the report's `kept` names it.
        world: The ranks that take part; torch.distributed's default group, or else this process alone.
        donate: Whether the target's tensors are given away: they are filled in place and returned, those that
            factories hold too. Tied weights, one memory under several keys, are filled once. If the load
            fails from step 5 on, their content may be lost. A module's load hooks aren't called: `load_module` does.
        cast: Whether what is stored in another dtype than the target's is converted, as `torch.Tensor.to` does; a
            fraction, an imaginary part or an integer that doesn't fit is an error. If False, another dtype is an error.
            Quantised values, as FP8, are an error where scales are stored beside them: alone they are other numbers.
        plain: Patterns of keys of values that need no scales, though tensors are stored beside them that are named
            like scales: they may be cast.
        device: Device of a tensor whose target has no memory, since its data is None, a meta or a lazy tensor; the
            CPU by default. Ranks may pass different devices.
        layout: The tensor shards that all ranks ask for, as every rank computed them by itself from a mesh and specs,
            or from DTensors: then no layouts are exchanged, only a hash of this one, which is checked in any case.
        transform: A trace that makes the target's tensors of those that are stored, by key: each rank reads what its
            own are made of. Their integrity isn't checked: ranks may need the same elements, and leave some out.
            Other values do too whose method ``stored_target(target, /, *, cast, plain)`` returns the target to load
            in place of the given one, whose factories make the given one's tensors of those that are stored.
        strategies: The dispatch table; None for the process's.
        options: Options of the read: verification, exchange between ranks, classes, rules for objects, progress.

    Returns:
        The tree; with a strict mode that returns keys, ``(tree, missing, unexpected)``.

    Raises:
        MetadataError: `device` isn't one that this machine has, or is the meta device.
        NotACheckpoint: there is none.
        KeyMismatch: the checkpoint lacks what the target asks for, or more than `strict` allows; or a plain tensor of
            the target is stored under another key than that of its path.
        TreeError: the target doesn't fit the common state, or is too deep; a rule for objects fits no key.
        UnsupportedValue: a shard is hidden in a value of the target that isn't entered; a rule can't handle an object.
        ShapeError: a tensor's global shape or dtype differs, the checkpoint doesn't cover the target, a stored value
            can't be converted, or only with its scales, donated tensors share memory (tied ones: and what is stored
            differs) or can't be written, or objects of another shape have no rule.
        IntegrityError: elements don't have one main replica each, or `layout` isn't what the ranks ask for, or not the
            same on all.
        CorruptCheckpoint: stored bytes aren't what was saved.
        UnsafeFile: it holds pickled values, and `allow_pickle` isn't given.
        RemoteError: on every rank, if one of several failed; also an instance of the class above that all failures
            share.

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
    options = LoadOptions() if options is None else options
    choices = (sharded_strategy, common_strategy, strategies)
    validate = validate_access_integrity and transform is None
    request = LoadRequest(
        sharded_state_dict,
        choices,
        layout,
        strict,
        validate=validate,
        cast=cast,
        plain=plain,
        donate=donate,
        device=device,
        options=options,
    )
    if transform is not None:
        with suppress(TreeError):  # of a target that is no tree: it is raised in step 2, on all ranks
            request = replace(request, tree=target_through(sharded_state_dict, transform, cast=cast, plain=plain))
    checkpoint_or_error = tried(partial(open_alone, checkpoint_dir, ranks, options, strategies))  # 1: runs now
    local, messages = ask(ranks, checkpoint_or_error, request)  # 2: all ranks wait
    local = with_metadata(request, local)  # 2: all wait, for some formats
    # Before the checks, which are one phase of all ranks: comparing keys takes collectives of its own.
    missing, unexpected = compare_keys(ranks, request, local)  # 3: all wait, in some strict modes
    checked_load = check_ranks(request, local, messages, missing, unexpected)  # 4: reads no tensor; all wait
    # The first step that writes into donated tensors; no other tensor of the target ever changes.
    objects, report = read_into(checked_load.reading, checked_load.destination)  # 5: reads; all wait
    tree = put_together(checked_load, objects, report)  # 6: may write into donated tensors; all wait
    return (tree, missing, unexpected) if local.mode in RETURNING else tree


_LAST_STEPS = ("load: deliver", "load: join")


def put_together(checked_load: CheckedLoad, objects: Sequence[Any], amount: ReadReport) -> Any:
    """Return the tree of the common state and what was read, once all ranks have theirs; a barrier.

    Args:
        checked_load: The load, its memory filled.
        objects: The data of the objects among the target's leaves.
        amount: The amount that was read; goes to the caller's `report`.
    """
    checkpoint = checked_load.reading.checkpoint
    finish = partial(_put_together, checked_load, objects, amount, checkpoint.options.report)
    return agree(checkpoint.world, "load: report", finish, steps=_LAST_STEPS)


def _put_together(
    checked_load: CheckedLoad,
    objects: Sequence[Any],
    amount: ReadReport,
    report: Callable[[ReadReport], None] | None,
) -> Any:
    with step("load: deliver"):
        leaves = deliver(checked_load.reading, checked_load.destination, objects)
    with step("load: join"), refuse_too_deep("load"):
        # Factories merge after the join, so that they see the plain values that they built beside their shards.
        tree = checked_load.target.merge(join_leaves(checked_load.common, checked_load.target, leaves))
    if report is not None:
        omitted, why = checked_load.omissions, checked_load.reading.exchange.why
        amount = replace(amount, left_out=omitted.left_out, unfilled=omitted.unfilled)
        report(replace(amount, kept=omitted.kept, exchange=why))
    return tree
