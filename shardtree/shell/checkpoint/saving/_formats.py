"""Which format writes what of a save, and the fields of metadata.json that each returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....core.mapping import ShardedObject, ShardedTensor
from ....errors import IntegrityError, StrategyError, UnsupportedValue, error_text
from ...table import AsyncRequest, PendingSave, Strategies, StrategyAction
from .._dispatch import DEFAULT_BACKEND, Backends, Choice, objects_backend, strategy_of

Fields = Mapping[str, Any]
Writes = tuple[tuple[ShardedTensor, ...], tuple[ShardedObject, ...]]


def requests_of_formats(
    pending: PendingSave, writes: Writes, choice: Choice, backends: Backends, strategies: Strategies | None
) -> tuple[AsyncRequest[Any], ...]:
    """Return the request of the shards' format, and that of the other one where objects go to it."""
    tensors, objects = writes
    holder = objects_backend(*backends, strategies)
    if holder is None and objects:
        (sharded, common), names = backends, [repr(item.unique_key) for item in objects]
        what = f"save: {sharded[0]!r} holds tensors alone, and {common[0]!r} can't hold these objects beside it"
        fix = f"Leave them out of the tree, or name common_strategy={DEFAULT_BACKEND!r}."
        raise UnsupportedValue(error_text(what, offenders=names, fix=fix))
    save_sharded = strategy_of(StrategyAction.SAVE_SHARDED, choice, backends[0], strategies)
    requests = [save_sharded(pending, [*tensors, *(objects if holder == backends[0] else ())])]
    if holder not in (None, backends[0]):
        requests.append(strategy_of(StrategyAction.SAVE_SHARDED, None, holder, strategies)(pending, objects))
    for request in requests:
        if not isinstance(request, AsyncRequest):
            fix = "Return what is still to do, as `save_with_index` does."
            raise _misfit("a function that saves", request, "an AsyncRequest", fix)
    return tuple(requests)


def checked_fields(fields: Any) -> Fields:
    """Return what a row has returned as fields of metadata.json, after checking that it is a mapping."""
    if not isinstance(fields, Mapping):
        raise _misfit("a commit", fields, "a mapping of fields of metadata.json", "Return {} where there are none.")
    return fields


def united_fields(fields: Fields, others: Fields) -> dict[str, Any]:
    """Return the fields of the shards' format and those of the objects', of which neither may overwrite the other's."""
    # The save's name is the same in both, where both write to its folder.
    if both := sorted(repr(name) for name in fields.keys() & others.keys() if fields[name] != others[name]):
        what = "save: the formats of the shards and of the objects beside them have the same fields of metadata.json"
        fix = "Give the shards' format a row for LOAD_OBJECTS, or fields with names of its own."
        raise StrategyError(error_text(what, offenders=both, fix=fix))
    return {**fields, **others}


def _misfit(what: str, value: Any, expected: str, fix: str) -> StrategyError:
    text = error_text(f"save: not what {what} returns", found=type(value).__name__, expected=expected, fix=fix)
    return StrategyError(text)


def check_can_fingerprint(backend: str, *, whole: bool) -> None:
    """Raise unless a save to a format can store fingerprints.

    Args:
        backend: of the shards.
        whole: whether the ranks check that their shards make whole tensors.

    Raises:
        StrategyError: the format has no place for them.
        IntegrityError: a tensor with gaps has none.

    Examples:
        >>> check_can_fingerprint("safetensors", whole=True)
    """
    # Only our own format has a column that readers who don't know it pass over.
    if backend != DEFAULT_BACKEND[0]:
        what = f"save: {backend!r} has no place for fingerprints"
        fix = "Leave out SaveOptions(fingerprint=True), and keep what st.fingerprint(tree) returns elsewhere."
        raise StrategyError(error_text(what, fix=fix))
    if not whole:
        what = "save: SaveOptions(fingerprint=True) needs validate_access_integrity=True"
        raise IntegrityError(error_text(what, fix="A tensor with gaps has no fingerprint: leave out one of the two."))
