"""The formats of a save: which format writes which part of the tree, and the fields of metadata.json from each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from ....core.mapping import ShardedObject, ShardedTensor
from ....core.trees import United
from ....errors import IntegrityError, StrategyError, UnsupportedValue, error_text
from ...table import AsyncRequest, PendingSave, SaveCommon, Strategies, StrategyAction, find_strategy, traits_of
from .._consistency import unions_field
from .._dispatch import DEFAULT_BACKEND, Backends, Choice, objects_backend, strategy_of

Fields = Mapping[str, Any]
Writes = tuple[tuple[ShardedTensor, ...], tuple[ShardedObject, ...]]
"""The tensors and the objects that a rank writes."""


@dataclass(frozen=True, slots=True)
class Formats:
    """The formats of a save.

    Attributes:
        choices: The caller's choices for the shards and for the common state.
        strategies: Dispatch table; None for the process's.
        backends: The (backend, version) pairs that the choices stand for; the defaults until they are looked up.
    """

    choices: tuple[Choice, Choice]
    strategies: Strategies | None
    backends: Backends = (DEFAULT_BACKEND, DEFAULT_BACKEND)

    @property
    def in_save_folder(self) -> bool:
        """Whether all files of the save lie in its own folder, so that no two saves have files of the same name."""
        return all(traits_of(*backend, self.strategies).in_save_folder for backend in self.backends)


@dataclass(frozen=True, slots=True, eq=False)
class FormatSteps:
    """The steps of a save that its formats perform on one rank.

    Attributes:
        requests: Requests that write the shards: one from the tensors' format, and one from the objects' format if the
            two formats differ.
        save_common: Function that writes the common state, and returns the format's fields for metadata.json.
        publish: Function that makes the folder a checkpoint, given all fields for metadata.json; None if writing that
            file does this.
        recognizes: Whether the shards' format recognises folders without a metadata.json.
    """

    requests: tuple[AsyncRequest[Any], ...]
    save_common: Callable[[], Fields]
    publish: Callable[[Fields], None] | None
    recognizes: bool

    def index(self, results: Sequence[tuple[Any, ...]]) -> Fields:
        """Write the formats' indexes, and return their fields; on rank 0.

        Args:
            results: The results of all requests, by rank.

        Raises:
            StrategyError: an index's result isn't a mapping of fields, or two indexes have different values of a field.
        """
        fields: dict[str, Any] = {}
        for number, request in enumerate(self.requests):
            others = _checked(request.index([result[number] for result in results]), "an index")
            # Equal values are allowed: both may write to the save's folder, and return its name.
            if both := sorted(repr(name) for name in fields.keys() & others.keys() if fields[name] != others[name]):
                heading = "save: the formats of shards and objects return different values for fields of metadata.json"
                fix = "Rename these fields in one format, or let the shards' format store objects (see LOAD_OBJECTS)."
                raise StrategyError(error_text(heading, offenders=both, fix=fix))
            fields |= others
        return fields


def steps_of_formats(
    pending: PendingSave, writes: Writes, formats: Formats, unions: United = MappingProxyType({})
) -> FormatSteps:
    """Plan this rank's files, and return the steps that the formats will perform; nothing is written yet.

    Args:
        pending: The save, with the common state.
        writes: The tensors and objects that this rank writes.
        formats: The formats, with their backends.
        unions: Intersection of the ranks' keys, for each dict of the common state whose keys differ between ranks; by
            the dict's path. Recorded in metadata.json.

    Raises:
        StrategyError: a format can't save.
        UnsupportedValue: a value can't be stored.
    """
    (sharded, common), strategies = formats.backends, formats.strategies
    save_common = strategy_of(StrategyAction.SAVE_COMMON, formats.choices[1], common, strategies)
    requests = _requests(pending, writes, formats)
    # Later rows get the state of their own format's request, never another format's.
    state_of_common = requests[-1].state if sharded == common or len(requests) > 1 else None
    publish = find_strategy(StrategyAction.PUBLISH, *sharded, strategies=strategies)
    return FormatSteps(
        requests,
        partial(_common_fields, save_common, replace(pending, state=state_of_common), unions),
        None if publish is None else partial(publish, replace(pending, state=requests[0].state)),
        find_strategy(StrategyAction.RECOGNIZE, *sharded, strategies=strategies) is not None,
    )


def _requests(pending: PendingSave, writes: Writes, formats: Formats) -> tuple[AsyncRequest[Any], ...]:
    (tensors, objects), (sharded, common), strategies = writes, formats.backends, formats.strategies
    holder = objects_backend(sharded, common, strategies)
    if holder is None and objects:
        names = [repr(item.unique_key) for item in objects]
        heading = f"save: backend {sharded[0]!r} stores only tensors, and backend {common[0]!r} cannot store objects"
        fix = f"Leave the objects out of the tree, or pass common_strategy={DEFAULT_BACKEND!r}."
        raise UnsupportedValue(error_text(heading, offenders=names, fix=fix))
    save_sharded = strategy_of(StrategyAction.SAVE_SHARDED, formats.choices[0], sharded, strategies)
    requests = [save_sharded(pending, [*tensors, *(objects if holder == sharded else ())])]
    if holder not in (None, sharded):
        requests.append(strategy_of(StrategyAction.SAVE_SHARDED, None, holder, strategies)(pending, objects))
    for request in requests:
        if not isinstance(request, AsyncRequest):
            fix = "Return a request, such as that of `save_with_index`."
            raise _misfit("a function that saves", request, "an AsyncRequest", fix)
    return tuple(requests)


def _common_fields(save_common: SaveCommon, pending: PendingSave, unions: United) -> Fields:
    fields = _checked(save_common(pending, pending.common), "a function that saves the common state")
    # Formats of other programs get no fields of ours: Megatron-Core refuses a metadata.json that has any.
    return {**fields, **unions_field(unions)} if "common" in fields else fields


def _checked(fields: Any, of: str) -> Fields:
    if not isinstance(fields, Mapping):
        raise _misfit(of, fields, "a mapping of fields of metadata.json", "Return {} if there are none.")
    return fields


def _misfit(what: str, value: Any, expected: str, fix: str) -> StrategyError:
    text = error_text(f"save: invalid result of {what}", found=type(value).__name__, expected=expected, fix=fix)
    return StrategyError(text)


def check_can_fingerprint(backend: str, *, whole: bool) -> None:
    """Raise if fingerprints can't be stored, because of the format or because tensors may have gaps.

    Args:
        backend: The shards' backend.
        whole: Whether the ranks check that their shards cover each tensor as a whole.

    Raises:
        StrategyError: the format can't store fingerprints.
        IntegrityError: tensors may have gaps, and so no fingerprint.

    Examples:
        >>> check_can_fingerprint("safetensors", whole=True)
    """
    # Only our own format has an optional column, which older readers ignore.
    if backend != DEFAULT_BACKEND[0]:
        heading = f"save: {backend!r} cannot store fingerprints"
        fix = "Leave out SaveOptions(fingerprint=True), and keep the result of st.fingerprint(tree) elsewhere."
        raise StrategyError(error_text(heading, fix=fix))
    if not whole:
        heading = "save: SaveOptions(fingerprint=True) cannot be combined with validate_access_integrity=False"
        raise IntegrityError(error_text(heading, fix="Pass only one of them: a tensor with gaps has no fingerprint."))
