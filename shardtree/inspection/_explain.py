"""explain: the outcome of a load, predicted from metadata and the common state alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..core.ambient import shielded
from ..core.geometry import refuse
from ..core.layouts import ShardColumns
from ..core.trees import Transform, target_through
from ..errors import MetadataError
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
    """Return the predicted outcome of a `load` with a target, in a world of one rank: its problems and its reads.

    The result's `ok` says whether that load would succeed. Only metadata and the common state are read, and no memory
    is allocated for tensors. For one rank of several, pass ``validate_access_integrity=False``, or pass the targets of
    all ranks to `explain_ranks`.

    Args:
        sharded_state_dict: The target. The data of its shards may be None or on any device.
        checkpoint_dir: Directory or URL of the checkpoint.
        sharded_strategy: Strategy for shards, as in `load`. If it is a function, its effect is unknown before it runs.
        common_strategy: Strategy for the common state, as in `load`. A function is run, since the target must fit its
            result.
        validate_access_integrity: Whether every element must be asked for by exactly one main replica.
        strict: Mode for keys that only the target or only the checkpoint has.
        donate: Whether the target's tensors would be donated.
        device: Device of tensors that have no memory in the target.
        cast: Whether the load would convert dtypes.
        plain: Key patterns of values that may be converted without their scales, as in `load`.
        layout: The tensor shards that all ranks ask for, as in `load`.
        transform: Trace that makes the target's tensors from the stored ones, as in `load`.
        strategies: Dispatch table; None for the process's.
        options: Options of the read, as in `load`.

    Returns:
        The explanation; its text is a table.

    Raises:
        NotACheckpoint: There is no checkpoint.
        CorruptCheckpoint: Metadata or the common state is damaged, or a file is missing or has a wrong length.
        StrategyError: The format can't list its contents, or an option has an unknown value.
        KeyMismatch: The strict mode is unknown.

    Examples:
        >>> import tempfile, torch, shardtree as st
        >>> folder = tempfile.mkdtemp()
        >>> st.save({"w": st.ShardedTensor.from_rank_offsets("weight", torch.arange(4.0))}, folder)
        >>> print(explain({"w": st.ShardedTensor.from_rank_offsets("wieght", torch.zeros(4))}, folder))
        The target does not fit the checkpoint.
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
    """Return the predicted outcome of a `load` by several ranks, found in one process from all their targets.

    The result's `ok` is True if that load would succeed on every rank, and False if it would raise, provided that
    stored bytes verify and factories can merge what was loaded. It is None if the outcome depends on stored values;
    `undecided` lists the open questions.

    Args:
        sharded_state_dicts: Targets of all ranks, by rank. Each is requested several times, and not kept: a sequence
            that makes them on request takes the memory of one target.
        checkpoint_dir: Directory or URL of the checkpoint.
        sharded_strategy: Strategy for shards; this and all further arguments are as in `explain`, and the same for all
            ranks.
        transform: One trace for all ranks, or a sequence with a trace for each rank.

    Returns:
        The explanation, with what each rank would read from storage.

    Raises:
        NotACheckpoint, CorruptCheckpoint, StrategyError, KeyMismatch: The checkpoint or an argument is invalid, as in
            `explain`.
        MetadataError: The number of traces differs from the number of targets.

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
        sharded_state_dicts = _targets_through(sharded_state_dicts, transform, cast=cast, plain=plain)
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


@dataclass(frozen=True, slots=True)
class _Targets(Sequence[Any]):
    """Ranks' targets, transformed on request, since all of them together might fill the memory."""

    trees: Sequence[Any]
    transforms: Sequence[Transform]
    cast: bool
    plain: Sequence[str]

    def __len__(self) -> int:
        return len(self.trees)

    def __getitem__(self, rank: Any) -> Any:
        return target_through(self.trees[rank], self.transforms[rank], cast=self.cast, plain=self.plain)


def _targets_through(
    trees: Sequence[Any], transforms: Transform | Sequence[Transform], *, cast: bool = False, plain: Sequence[str] = ()
) -> Sequence[Any]:
    """Return the targets of all ranks, changed by one transform for all ranks, or by a transform for each rank.

    Args:
        trees: Targets, by rank.
        transforms: The transform, or a sequence with one for each rank.
        cast: Whether the load would convert dtypes.
        plain: Key patterns of values that may be converted without their scales, as in `load`.

    Raises:
        MetadataError: There aren't as many transforms as targets.
    """
    rank_transforms = transforms if isinstance(transforms, Sequence) else [transforms] * len(trees)
    if len(rank_transforms) != len(trees):
        expected, fix = f"one for each of {len(trees)} targets", "Pass one trace, or one for each rank."
        refuse("transform", "traces", len(rank_transforms), expected, fix, error=MetadataError)
    return _Targets(trees, rank_transforms, cast, plain)
