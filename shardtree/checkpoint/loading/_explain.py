"""explain: what a load would do, found out from metadata and the common state alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...layouts import ObjectRule, ShardColumns
from ...plans import Explanation
from ...storage import Directory, Verify
from ...strategies import LoadOptions, Strategies
from ...world import one_process
from .._dispatch import Choice
from .._open import open_at
from ._exchange import Exchange
from ._settle import Wanted
from ._strict import StrictHandling
from ._verdict import explanation


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
    exchange: Exchange = "auto",
    object_rules: Mapping[str, ObjectRule] | None = None,
    verify: Verify = "whole",
    allow_pickle: bool = False,
    types: tuple[type, ...] = (),
    strategies: Strategies | None = None,
    layout: ShardColumns | None = None,
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
        exchange: as in `load`; a single rank has none to exchange with.
        object_rules: for objects in another shape, as in `load`.
        verify: which blocks would be checked against their hashes.
        allow_pickle: whether pickled values of the common state may be unpickled, which can run any code.
        types: classes that stored records become instances of, as in `load`.
        strategies: the dispatch table; None for the process's.
        layout: the tensor shards that all ranks ask for, as in `load`.

    Returns:
        The explanation; its text is a table.

    Raises:
        NotACheckpoint: there is none.
        CorruptCheckpoint: metadata or the common state isn't what was saved, or a file isn't there, or has another
            length.
        StrategyError: the format doesn't tell what it holds; or there is no such `verify` or `exchange`.
        KeyMismatch: there is no such strict mode.

    Examples:
        >>> import tempfile, torch, shardtree as st
        >>> folder = tempfile.mkdtemp()
        >>> st.save({"w": st.ShardedTensor.from_rank_offsets("weight", torch.arange(4.0))}, folder)
        >>> print(explain({"w": st.ShardedTensor.from_rank_offsets("wieght", torch.zeros(4))}, folder))
        The target doesn't fit the checkpoint.
        1 problem:
          not stored: 'wieght' (did you mean 'weight'?)
        1 key:
          stored, not asked for: 'weight'
        <BLANKLINE>
        rank  shards  objects  asked for  read  over-read  pieces  files
           0       1        0        0 B   0 B       1.00       0      0
    """
    checkpoint = open_at(checkpoint_dir, one_process(), LoadOptions(verify, allow_pickle, types), strategies)
    choices = (sharded_strategy, common_strategy, strategies)
    wanted = Wanted(None, layout, strict, validate_access_integrity, cast, object_rules, donate, exchange, device)
    return explanation(checkpoint, choices, wanted, [sharded_state_dict])


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
    exchange: Exchange = "auto",
    object_rules: Mapping[str, ObjectRule] | None = None,
    verify: Verify = "whole",
    allow_pickle: bool = False,
    types: tuple[type, ...] = (),
    strategies: Strategies | None = None,
    layout: ShardColumns | None = None,
) -> Explanation:
    """Return what a `load` by several ranks would do, found out in this process, given the targets of all of them.

    Its `ok` is True if that load would succeed on every rank, and False if it would raise, for stored bytes that verify
    and factories that can merge what was loaded. It is None where only values can tell, which `undecided` lists.

    Args:
        sharded_state_dicts: each rank's target, by rank.
        checkpoint_dir: where the checkpoint is.
        sharded_strategy: this and all that follow are as in `explain`, and the same for all ranks.
        common_strategy: see `explain`.
        validate_access_integrity: see `explain`.
        strict: see `explain`.
        donate: see `explain`.
        device: see `explain`.
        cast: see `explain`.
        exchange: whether ranks that want the same shard would read it once between them.
        object_rules: see `explain`.
        verify: see `explain`.
        allow_pickle: see `explain`.
        types: see `explain`.
        strategies: see `explain`.
        layout: see `explain`.

    Returns:
        The explanation, with what each rank would read from storage.

    Raises:
        NotACheckpoint, CorruptCheckpoint, StrategyError, KeyMismatch: as `explain`.

    Examples:
        >>> import tempfile, torch, shardtree as st
        >>> folder = tempfile.mkdtemp()
        >>> st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(4, 6))}, folder)
        >>> columns = [st.ShardedTensor.from_rank_offsets("w", torch.zeros(4, 2), (1, rank, 3)) for rank in range(3)]
        >>> explanation = explain_ranks([{"w": shard} for shard in columns], folder, verify=None)
        >>> explanation.ok, [one.cost.bytes_wanted for one in explanation.reads], explanation.over_read
        (True, [32, 32, 32], 2.5)
    """
    checkpoint = open_at(checkpoint_dir, one_process(), LoadOptions(verify, allow_pickle, types), strategies)
    choices = (sharded_strategy, common_strategy, strategies)
    wanted = Wanted(None, layout, strict, validate_access_integrity, cast, object_rules, donate, exchange, device)
    return explanation(checkpoint, choices, wanted, sharded_state_dicts)
