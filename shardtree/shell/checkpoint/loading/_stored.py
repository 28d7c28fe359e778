"""The contents of a checkpoint, to compare with the target of a load: keys, kinds, objects, common state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ....core.codec import named_types
from ....errors import StrategyError, UnsafeFile, UnsupportedValue
from ...table import Checkpoint, Strategies, StrategyAction, find_strategy, get_default_strategy
from ...table.index import stored_keys, stored_kinds, untaken_of
from .._dispatch import Choice, are_objects_beside, backend_of, common_backend, sharded_backend
from .._open import Metadata, load_common, sharded_metadata
from ._targets import Kinds

Choices = tuple[Choice, Choice, Strategies | None]
"""The caller's strategies for the shards and for the common state, and the dispatch table."""


@dataclass(frozen=True, eq=False)
class Stored:
    """A checkpoint's contents without tensor data; each part is read on first access and memoised.

    Attributes:
        checkpoint: The opened checkpoint.
        choices: The strategies that read it.

    Examples:
        >>> import torch, shardtree as st
        >>> from shardtree.shell.checkpoint import open_at
        >>> from shardtree.shell.world import one_process
        >>> folder = st.storage.MemoryStorage()
        >>> st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(4)), "step": 7}, folder)
        >>> stored = Stored(open_at(folder, one_process(), st.LoadOptions(), None), (None, None, None))
        >>> stored.keys, stored.kinds(["w"])["w"].global_shape, stored.common(())["step"]
        ({'w'}, (4,), 7)
    """

    checkpoint: Checkpoint
    choices: Choices
    _commons: dict[tuple[type, ...], Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def can_list(self) -> bool:
        """Whether the format of the tensors can list the tensors that it holds."""
        return find_strategy(StrategyAction.LOAD_METADATA, *self._backend, strategies=self.choices[2]) is not None

    @property
    def _backend(self) -> tuple[str, int]:
        sharded, _, strategies = self.choices
        return backend_of(sharded, sharded_backend(self.checkpoint.fields), strategies)

    @cached_property
    def tensors(self) -> Metadata:
        """The stored tensors, and the objects that are stored in the same format.

        Raises:
            StrategyError: The format doesn't list its contents.
        """
        row = (StrategyAction.LOAD_METADATA, *self._backend)
        metadata: Metadata = get_default_strategy(*row, strategies=self.choices[2])(self.checkpoint)
        return metadata

    @cached_property
    def objects(self) -> Metadata | None:
        """The contents of the format that stores the objects: all objects, and any tensors that it stores too.

        None if the objects have a format of their own, which can't list its contents.

        Raises:
            StrategyError: The format stores objects and tensors, and doesn't list its contents.
        """
        beside, strategies = common_backend(self.checkpoint.fields), self.choices[2]
        if not are_objects_beside(self._backend, beside, strategies):
            return self.tensors
        fallback = find_strategy(StrategyAction.LOAD_METADATA, *beside, strategies=strategies)
        return None if fallback is None else fallback(self.checkpoint)

    @cached_property
    def listing(self) -> Metadata:
        """All stored tensors and objects.

        Raises:
            StrategyError: The format doesn't list its contents.
        """
        sharded, common, strategies = self.choices
        # A caller's function loads shards but can't list them, so the format's own row does.
        pair = (None if callable(sharded) else sharded, None if callable(common) else common)
        return sharded_metadata(self.checkpoint, *pair, strategies)

    @property
    def _listing_if_any(self) -> Metadata:
        try:
            return self.listing
        except StrategyError:
            return {}

    @cached_property
    def keys(self) -> set[str]:
        """The keys of all stored tensors and objects; empty if the format doesn't list them."""
        return stored_keys(self._listing_if_any)

    @property
    def untaken(self) -> Mapping[str, str]:
        """The reasons why some stored tensors can't be read, by key."""
        return untaken_of(self._listing_if_any)

    def kinds(self, keys: Iterable[str]) -> Kinds:
        """Return the dtypes and shapes of stored tensors among the given keys."""
        return stored_kinds(self._listing_if_any, sorted(keys))

    def common(self, types: tuple[type, ...]) -> Any:
        """Return the common tree, with instances of the target's namedtuple classes where they fit.

        Raises:
            CorruptCheckpoint: The stored bytes are damaged.
            UnsafeFile: The common state holds pickled values, and `allow_pickle` is False.
        """
        if types in self._commons:
            return self._commons[types]
        checkpoint, (_, common, strategies) = self.checkpoint, self.choices
        # The caller's types come last, so that they take precedence over the target's of the same name.
        options = replace(checkpoint.options, types=(*types, *named_types(checkpoint.options.types).values()))
        try:
            tree = load_common(replace(checkpoint, options=options), common, strategies)
        except UnsupportedValue:
            # If a class's fields have changed since the save, its instances become plain records, as without a target.
            tree = load_common(checkpoint, common, strategies)
        except UnsafeFile as error:
            error.add_note("Tensors can be read without the common state: see load_plain_tensors and open_checkpoint.")
            raise
        self._commons[types] = tree
        return tree
