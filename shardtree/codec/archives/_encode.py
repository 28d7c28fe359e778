"""`encode_archive`: a value as torch.save writes it, once it is sure that reading it takes no pickled code."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import torch

from ...errors import TreeError, TreePath, UnsupportedValue, error_text, render_path
from ...trees import Hole, Record
from .._dtypes import check_storable
from .._nodes import MAX_DEPTH, path_to
from .._record import record_of, type_name
from ._decode import decode_archive
from ._named_write import named_record, save_named
from ._plain import LEAVES, REBUILDS

_FIX = (
    "Store plain values made from it, or wrap it in LocalNonpersistentObject if it needn't be stored; "
    "allow_pickle=True stores it as a pickle, which runs code when it is loaded."
)


def encode_archive(value: Any, *, allow_pickle: bool = False) -> bytes:
    """Return the bytes that torch.save writes for a value, which `decode_archive` and torch.load read.

    Tensors are stored as plain ones that need no gradient, without the rest of a storage that they are a part of; what
    stands in two places is stored twice. Enum members, dataclasses and named tuples are stored as pickle does, by the
    name of their class: who reads them passes the class in ``types``.

    Args:
        value: what `encode_tree` takes too, but for `HOLE`, and of `Record`s only those that `decode_archive` makes;
            and `types.SimpleNamespace`, `Counter`.
        allow_pickle: store other values too, which run code when they are loaded.

    Raises:
        UnsupportedValue: a value is none of these.
        TreeError: it is more than 100 deep, or contains itself.

    Examples:
        >>> import io
        >>> torch.load(io.BytesIO(encode_archive({"step": 7, "betas": (0.9, 0.95)})))
        {'step': 7, 'betas': (0.9, 0.95)}
    """
    classes: set[type] = set()
    plain = _plain(value, (), (), allow_pickle, classes)
    file = BytesIO()
    try:
        save_named(plain, file) if Record in classes else torch.save(plain, file)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise UnsupportedValue(
            error_text("encode_archive: the value can't be pickled", found=reason, fix=_FIX)
        ) from error
    data = file.getvalue()
    if classes - {Record} and not allow_pickle:
        # Such a class may have its own way of being pickled.
        decode_archive(data, what="encode_archive: what was just encoded", types=classes - {Record})
    return data


def _plain(value: Any, path: TreePath, parents: tuple[Any, ...], allow_pickle: bool, classes: set[type]) -> Any:
    """Return a value's copy to be pickled; `parents` are the values that hold it, outermost first."""
    if len(parents) > MAX_DEPTH:
        what = f"encode_archive: more than {MAX_DEPTH} deep, or a value that contains itself"
        raise TreeError(error_text(f"{what}, at {render_path(path_to(path))}", fix="Flatten it, and break cycles."))
    kind = type(value)
    if kind in LEAVES:
        return value

    def child(inner: Any, *steps: Any) -> Any:
        return _plain(inner, path + steps, (*parents, value), allow_pickle, classes)

    rebuild = REBUILDS.get(kind)
    plain = _record(value, child, classes) if rebuild is None else rebuild(value, child)
    if plain is not NotImplemented:
        return plain
    if allow_pickle:
        return value
    what = f"encode_archive: {render_path(path_to(path))}"
    if isinstance(value, torch.Tensor):
        check_storable(value.dtype, what)
    raise UnsupportedValue(error_text(f"{what} can't be stored", found=type_name(kind), fix=_FIX))


def _record(value: Any, child: Any, classes: set[type]) -> Any:
    named = named_record(value, child)
    if named is not NotImplemented:
        classes.add(Record)
        return named
    record = record_of(value)
    if record is None or isinstance(value, Record | Hole) or "." in type(value).__qualname__:
        return NotImplemented
    for name, field in record.fields.items():
        child(field, name)
    classes.add(type(value))
    return value
