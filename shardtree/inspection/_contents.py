"""The contents of a checkpoint except elements: its common state, and its tensors and objects without data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.ambient import shielded
from ..core.mapping import ShardedObject, ShardedTensor
from ..core.trees import without_holes
from ..errors import TreeError, error_text
from ..shell.checkpoint import (
    CONTENT_METADATA,
    Choice,
    by_rank_zero,
    given_options,
    load_common,
    open_at,
    sharded_metadata,
    tensors_of,
)
from ..shell.storage import Directory
from ..shell.table import LoadOptions, Strategies
from ..shell.world import one_process


@shielded
def load_common_state_dict(
    checkpoint_dir: Directory,
    *,
    world: Any = None,
    strategies: Strategies | None = None,
    options: LoadOptions | None = None,
) -> Any:
    """Return the common state: the plain values stored outside the shards.

    Shards are left out of dicts; in lists and tuples, `HOLE` replaces them.

    Args:
        checkpoint_dir: Path, URL or storage of the checkpoint.
        world: World whose ranks all get the result; rank 0 reads it, and the call is collective. None for this process
            alone.
        strategies: Dispatch table; None for the process's.
        options: Options of the read; `allow_pickle` and `types` matter here.

    Raises:
        NotACheckpoint: There is no checkpoint.
        UnsafeFile: The common state holds pickled values, and `allow_pickle` isn't given.

    Examples:
        >>> import tempfile, torch, shardtree as st
        >>> folder = tempfile.mkdtemp()
        >>> st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.arange(4)), "step": 7}, folder)
        >>> st.load_common_state_dict(folder)
        {'step': 7}
    """
    how = given_options("open", options, LoadOptions)

    def read() -> Any:
        return without_holes(load_common(open_at(checkpoint_dir, one_process(), how, strategies), None, strategies))

    return by_rank_zero(world, read)


@shielded
def load_tensors_metadata(
    checkpoint_dir: Directory,
    sharded_strategy: Choice = None,
    *,
    world: Any = None,
    strategies: Strategies | None = None,
    options: LoadOptions | None = None,
) -> dict[str, ShardedTensor]:
    """Return every stored tensor by its key, as one whole shard without data.

    Args:
        checkpoint_dir: Path, URL or storage of the checkpoint.
        sharded_strategy: Strategy that lists the shards; None for the strategy of the checkpoint's format.
        world: World whose ranks all get the result; rank 0 reads it, and the call is collective. None for this process
            alone.
        strategies: Dispatch table; None for the process's.
        options: Options of the read.

    Raises:
        NotACheckpoint: There is no checkpoint.

    Examples:
        >>> import tempfile, torch, shardtree as st
        >>> folder = tempfile.mkdtemp()
        >>> st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3))}, folder)
        >>> {key: shard.global_shape for key, shard in st.load_tensors_metadata(folder).items()}
        {'w': (2, 3)}
    """
    how = given_options("open", options, LoadOptions)

    def read() -> dict[str, ShardedTensor]:
        return tensors_of(open_at(checkpoint_dir, one_process(), how, strategies), sharded_strategy, strategies)

    return by_rank_zero(world, read)


@shielded
def load_sharded_metadata(
    checkpoint_dir: Directory,
    sharded_strategy: Choice = None,
    common_strategy: Choice = None,
    *,
    world: Any = None,
    strategies: Strategies | None = None,
    options: LoadOptions | None = None,
) -> dict[str, ShardedTensor | ShardedObject]:
    """Return every stored tensor by its key, as one whole shard, and every object by its unique key; without data.

    Args:
        checkpoint_dir: Path, URL or storage of the checkpoint.
        sharded_strategy: Strategy that lists the shards; None for the strategy of the checkpoint's format.
        common_strategy: Strategy that lists objects stored with the common state; None for the strategy of the common
            state's format.
        world: World whose ranks all get the result; rank 0 reads it, and the call is collective. None for this process
            alone.
        strategies: Dispatch table; None for the process's.
        options: Options of the read.

    Raises:
        NotACheckpoint: There is no checkpoint.

    Examples:
        >>> import tempfile, shardtree as st
        >>> folder = tempfile.mkdtemp()
        >>> st.save({"rng": st.ShardedObject("rng", 5, (1,), (0,))}, folder)
        >>> list(st.load_sharded_metadata(folder))
        ['rng/shard_0_1']
    """
    how = given_options("open", options, LoadOptions)

    def read() -> dict[str, ShardedTensor | ShardedObject]:
        checkpoint = open_at(checkpoint_dir, one_process(), how, strategies)
        return dict(sharded_metadata(checkpoint, sharded_strategy, common_strategy, strategies).items())

    return by_rank_zero(world, read)


@shielded
def load_content_metadata(
    checkpoint_dir: Directory | None = None,
    *,
    preloaded_state_dict: Mapping[str, Any] | None = None,
    world: Any = None,
    strategies: Strategies | None = None,
    options: LoadOptions | None = None,
) -> Any:
    """Return the `content_metadata` that was passed to the save, or None.

    Args:
        checkpoint_dir: Path, URL or storage of the checkpoint.
        preloaded_state_dict: Result of `load` or `load_common_state_dict`, if the caller has it already: then nothing
            is read.
        world: World whose ranks all get the result; rank 0 reads it, and the call is collective. None for this process
            alone.
        strategies: Dispatch table; None for the process's.
        options: Options of the read; `allow_pickle` and `types` matter here.

    Raises:
        TreeError: Neither the directory nor the state is given.
        NotACheckpoint: There is no checkpoint.
        UnsafeFile: The common state holds pickled values, and `allow_pickle` isn't given.

    Examples:
        >>> load_content_metadata(preloaded_state_dict={"content_metadata": {"optimizer": "adam"}})
        {'optimizer': 'adam'}
    """
    if preloaded_state_dict is None:
        if checkpoint_dir is None:
            heading = "load_content_metadata: no checkpoint_dir and no preloaded_state_dict"
            raise TreeError(error_text(heading, fix="Pass one of them."))
        preloaded_state_dict = load_common_state_dict(
            checkpoint_dir, world=world, strategies=strategies, options=options
        )
    return preloaded_state_dict.get(CONTENT_METADATA) if isinstance(preloaded_state_dict, Mapping) else None
