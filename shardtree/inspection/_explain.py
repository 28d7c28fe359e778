"""explain: what a load would do, found out from metadata and the common state alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..core.ambient import shielded
from ..core.layouts import ShardColumns
from ..core.trees import Transform, targets_through
from ..shell.checkpoint import Choice, open_at
from ..shell.checkpoint.loading import LoadRequest, StrictHandling
from ..shell.storage import Directory
from ..shell.table import LoadOptions, Strategies, unless_replaced
from ..shell.world import one_process
from ._explained import Explanation
from ._explanation import explanation


@shielded
def explain(
    sharded_state_dict: Any,
    checkpoint_dir: Directory,
    sharded_strategy: Choice = None,
    common_strategy: Choice = None,
    validate_access_integrity: bool = True,
    strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
    *,
    donate: bool = False,
    device: str | torch.device | None = None,
    cast: bool = False,
    plain: Sequence[str] = (),
    layout: ShardColumns | None = None,
    transform: Transform | None = None,
    strategies: Strategies | None = None,
    options: LoadOptions | None = None,
) -> Explanation:
    """Return what `load` would do with a target, in a world of one: what is wrong, and how much would be read.

    Its `ok` is what becomes of that load. Only metadata and the common state are read, and no memory is made. For one
    rank of several, pass ``validate_access_integrity=False``; `explain_ranks` takes the targets of all.

    Args:
        sharded_state_dict: the target. The data of its shards may be None or on any device.
        checkpoint_dir: where the checkpoint is.
        sharded_strategy: as in `load`. What a function makes of the shards isn't known before it runs.
        common_strategy: as in `load`. A function runs, since the target must fit what it returns.
        validate_access_integrity: whether every element must be asked for by exactly one main replica.
        strict: what would be done about keys that only the target or only the checkpoint has.
        donate: whether the target's tensors would be given away.
        device: where tensors would be put whose target has none.
        cast: whether dtypes would be converted.
        plain: patterns of keys of values that need no scales, as in `load`.
        layout: the tensor shards that all ranks ask for, as in `load`.
        transform: a trace of what makes the target's tensors of those that are stored, as in `load`.
        strategies: the dispatch table; None for the process's.
        options: how the checkpoint would be read, as in `load`.

    Returns:
        The explanation; its text is a table.

    Raises:
        NotACheckpoint: there is none.
        CorruptCheckpoint: metadata or the common state isn't what was saved, or a file isn't there, or has another
            length.
        StrategyError: the format can't list what it holds; or an option has no such choice.
        KeyMismatch: there is no such strict mode.

    Examples:
        >>> import tempfile, torch, shardtree as st
        >>> folder = tempfile.mkdtemp()
        >>> st.save({"w": st.ShardedTensor.from_rank_offsets("weight", torch.arange(4.0))}, folder)
        >>> print(explain({"w": st.ShardedTensor.from_rank_offsets("wieght", torch.zeros(4))}, folder))
        The target doesn't fit the checkpoint.
        1 problem:
          'wieght': not stored (did you mean 'weight'?)
        1 key:
          stored, not asked for: 'weight'
        <BLANKLINE>
        rank  shards  objects  asked for  read  over-read  pieces  files
           0       1        0        0 B   0 B       1.00       0      0
    """
    return explain_ranks(
        [sharded_state_dict],
        checkpoint_dir,
        sharded_strategy,
        common_strategy,
        validate_access_integrity,
        strict,
        donate=donate,
        device=device,
        cast=cast,
        plain=plain,
        layout=layout,
        transform=transform,
        strategies=strategies,
        options=options,
    )


@shielded
def explain_ranks(
    sharded_state_dicts: Sequence[Any],
    checkpoint_dir: Directory,
    sharded_strategy: Choice = None,
    common_strategy: Choice = None,
    validate_access_integrity: bool = True,
    strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
    *,
    donate: bool = False,
    device: str | torch.device | None = None,
    cast: bool = False,
    plain: Sequence[str] = (),
    layout: ShardColumns | None = None,
    transform: Transform | Sequence[Transform] | None = None,
    strategies: Strategies | None = None,
    options: LoadOptions | None = None,
) -> Explanation:
    """Return what a `load` by several ranks would do, found out in this process, given the targets of all of them.

    Its `ok` is True if that load would succeed on every rank, and False if it would raise, for stored bytes that verify
    and factories that can merge what was loaded. It is None where only values can tell, which `undecided` lists.

    Args:
        sharded_state_dicts: each rank's target, by rank. They are asked for one at a time, more than once, and not
            kept: a sequence that makes them when it is asked takes the memory of one.
        checkpoint_dir: where the checkpoint is.
        sharded_strategy: this and all that follow are as in `explain`, and the same for all ranks.
        transform: one trace for all ranks, or each rank's.

    Returns:
        The explanation, with what each rank would read from storage.

    Raises:
        NotACheckpoint, CorruptCheckpoint, StrategyError, KeyMismatch: as `explain`.
        MetadataError: there aren't as many traces as targets.

    Examples:
        >>> import tempfile, torch, shardtree as st
        >>> folder = tempfile.mkdtemp()
        >>> st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(4, 6))}, folder)
        >>> columns = [st.ShardedTensor.from_rank_offsets("w", torch.zeros(4, 2), (1, rank, 3)) for rank in range(3)]
        >>> unchecked = st.LoadOptions(verify=None)
        >>> explanation = explain_ranks([{"w": shard} for shard in columns], folder, options=unchecked)
        >>> explanation.ok, [one.cost.bytes_wanted for one in explanation.reads], explanation.over_read
        (True, [32, 32, 32], 2.5)
    """
    options = LoadOptions() if options is None else options
    checkpoint = open_at(checkpoint_dir, one_process(), options, strategies)
    choices = (sharded_strategy, common_strategy, strategies)
    validate = validate_access_integrity and transform is None
    if transform is not None:
        sharded_state_dicts = targets_through(sharded_state_dicts, transform, cast=cast, plain=plain)
    request = LoadRequest(
        None,
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
    with unless_replaced(checkpoint):
        return explanation(checkpoint, request, sharded_state_dicts)
