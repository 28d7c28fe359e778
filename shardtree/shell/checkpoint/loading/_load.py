"""load: fill a sharded tree of any layout from a checkpoint of any layout."""

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

    Only the bytes that the target requests are read. A plain tensor in the target requests the whole stored tensor
    whose key is the plain tensor's path, joined by dots. If no tensor has that key, the result has the common state's
    value there. If there is none, the result lacks the tensor, and a warning and the report name it. Other plain values
    in the target are ignored. The result has all containers of the target, as in `trees.join`.

    Some of the stored common state is left out: lists, tuples and class instances that contain shards which the target
    doesn't request; and keys that only some ranks had and no rank's target has. If this leaves out plain values, the
    report and ``strict="raise_all"`` list their paths. The steps:

    1. Open: rank 0 reads metadata.json. No collective; ranks learn of a failure in the next step.
    2. Ask: ranks take their targets apart and exchange descriptions of them. One collective, two for many ranks. Then
       the metadata is completed: usually no collective; one if rank 0 parses a format's metadata for all, and one or
       three more if the metadata is incomplete.
    3. Find missing and unexpected keys, if `strict` needs them: one or two collectives, none in the default mode.
    4. Check: targets fit together and fit the checkpoint, the common state is read, memory is allocated. One
       collective; until here no tensor of the target is filled.
    5. Read: only the requested bytes. One collective; more if ranks read for each other.
    6. Put together: donated tensors are completed, leaves join the common state, factories merge, the report is made.
       One collective.

    Args:
        sharded_state_dict: The target, whose shards are requests. Their data may be tensors on any device (results go
            there), None, or meta tensors (results go to `device`). The target isn't changed.
        checkpoint_dir: Directory, URL or `Storage` of the checkpoint; or the attribute `checkpoint` of the result of
            `open_checkpoint`, which isn't opened again if `options` are the same.
        sharded_strategy: Replacement of the format's function that loads shards: a function, or the name or the
            (backend, version) of the row to use.
        common_strategy: Replacement of the format's function that loads the common state.
        validate_access_integrity: Whether ranks exchange their targets and check that exactly one main replica
            requests each element.
        strict: Mode for keys that only the target or only the checkpoint has. By default, a requested key that isn't
            stored is an error, and a stored key that isn't requested is ignored. Dicts of the result lack keys that a
            mode leaves out. A list, tuple or instance of a class (say, with a field that is new since the save) keeps
            the target's own value there, and the report's `kept` names it.
        world: The ranks that take part; torch.distributed's default group, or else this process alone.
        donate: Whether the target's tensors, including those that factories hold, are filled in place and returned.
            Tied weights, the same memory under several keys, are filled once. If the load fails from step 5 on, their
            content may be lost. A module's load hooks aren't called; `load_module` calls them.
        cast: Whether values that are stored in another dtype than the target's are converted, as `torch.Tensor.to`
            does; a fraction, an imaginary part or an integer that doesn't fit is an error. If False, another dtype is
            an error. Quantised values, such as FP8, are an error if scales are stored beside them, since without these
            they are different numbers.
        plain: Patterns of the keys whose values may be cast although tensors named like scales are stored beside them:
            they are plain numbers, not quantised ones.
        device: Device of tensors whose targets have no memory (None, meta or lazy tensors); the CPU by default. Ranks
            may pass different devices.
        layout: The tensor shards that all ranks request, computed by every rank from a mesh and specs, or from
            DTensors. Then no layouts are exchanged, only a hash of this one, which is always compared.
        transform: A trace that computes the target's tensors from stored ones, by key: each rank reads the elements
            that its own tensors need. Their integrity isn't checked: ranks may need the same elements, and omit others.
            Alternatively, any object with a method ``stored_target(target, /, *, cast, plain)``, which returns the
            target to load instead; its factories compute the original target's tensors from the stored ones.
        strategies: The dispatch table; None for the process's.
        options: Options of the read: verification, exchange between ranks, classes, rules for objects, progress.

    Returns:
        The tree; with a strict mode that returns keys, ``(tree, missing, unexpected)``.

    Raises:
        MetadataError: this machine doesn't have `device`, or it is the meta device.
        NotACheckpoint: the directory holds no finished checkpoint.
        KeyMismatch: a requested key isn't stored, or `strict` doesn't allow a difference of keys; or the key of a plain
            tensor, its path joined by dots, isn't stored, but another key seems to mean this tensor.
        TreeError: the target doesn't fit the common state, or is too deep; a rule for objects matches no key.
        UnsupportedValue: a shard lies inside a value that tree maps do not enter; a rule can't handle an object.
        ShapeError: a tensor's global shape or dtype differs; the checkpoint doesn't cover the target; a stored value
            can't be converted, or not without its scales; donated tensors can't be written, or share memory (tied
            weights: only if their stored values differ); or an array of objects has another shape and no rule.
        IntegrityError: an element doesn't have exactly one main replica, or `layout` differs from the ranks' targets or
            between ranks.
        CorruptCheckpoint: stored bytes are damaged.
        UnsafeFile: the checkpoint holds pickled values, and `allow_pickle` is False.
        RemoteError: on every rank, if one of several failed. If all failures have the same class among those above,
            the error is an instance of that class too.

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
        with suppress(TreeError):  # a target that isn't a tree is refused in step 2, on all ranks
            request = replace(request, tree=target_through(sharded_state_dict, transform, cast=cast, plain=plain))
    checkpoint_or_error = tried(partial(open_alone, checkpoint_dir, ranks, options, strategies))  # 1: runs now
    local, messages = ask(ranks, checkpoint_or_error, request)  # 2: all ranks wait
    local = with_metadata(request, local)  # 2: all wait, for some formats
    # Comparing keys takes collectives, so it precedes the checks, which are a single phase.
    missing, unexpected = compare_keys(ranks, request, local)  # 3: all wait, in some strict modes
    checked_load = check_ranks(request, local, messages, missing, unexpected)  # 4: reads no tensor; all wait
    # From this step on donated tensors are written; no other tensor of the target ever changes.
    objects, report = read_into(checked_load.reading, checked_load.destination)  # 5: reads; all wait
    tree = put_together(checked_load, objects, report)  # 6: may write into donated tensors; all wait
    return (tree, missing, unexpected) if local.mode in RETURNING else tree


_LAST_STEPS = ("load: deliver", "load: join")


def put_together(checked_load: CheckedLoad, objects: Sequence[Any], amount: ReadReport) -> Any:
    """Join the loaded leaves with the common state, and return the tree once all ranks have built theirs; a barrier.

    Args:
        checked_load: The load, with filled memory.
        objects: The data of the objects among the target's leaves, in order.
        amount: The report of the read; the caller's `report` function gets it, with the load's omissions added.
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
