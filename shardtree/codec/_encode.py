"""`encode_tree`: a tree of plain values as the bytes of a safetensors file."""

from __future__ import annotations

import json
import pickle
from typing import Any

import torch

from ..errors import TreeError, TreePath, UnsupportedValue, error_text, render_path
from ..trees import HOLE
from . import _arrays, _containers, _scalars
from ._dtypes import check_storable
from ._entry import Entry
from ._header import encode_header
from ._nodes import MAX_DEPTH, Blob, Encoder, Node, path_to, plain_blob
from ._record import record_of

_ENCODERS: dict[type, Encoder] = {**_scalars.ENCODERS, **_containers.ENCODERS, **_arrays.ENCODERS}


def encode_tree(tree: Any, *, allow_pickle: bool = False) -> bytes:
    """Return a tree of plain values as the bytes of a safetensors file, from which `decode_tree` makes it again.

    Each value comes back as what it was: None, numbers of any size, strings, bytes, ranges and slices, lists,
    tuples, sets, deques and dicts of any keys with their order, tensors, NumPy arrays and scalars, dtypes, devices,
    `io.BytesIO` with its position, paths, `argparse.Namespace`, `HOLE`. Tensors and parameters come back as plain
    tensors on the CPU that need no gradient, and OrderedDicts without their attributes. What stands in two places
    is stored twice. Enum members, dataclasses and named tuples are stored as `Record`s.

    Args:
        tree: any of these values in any of these containers, at most 100 deep.
        allow_pickle: store other values as pickles, which run code when they are loaded.

    Raises:
        UnsupportedValue: a value is none of these.
        TreeError: the tree is deeper, or contains itself.

    Examples:
        >>> from shardtree.codec import decode_tree
        >>> decode_tree(encode_tree({"step": 7, "betas": (0.9, 0.95), "rng": torch.arange(3)}))
        {'step': 7, 'betas': (0.9, 0.95), 'rng': tensor([0, 1, 2])}
    """
    try:
        node = _node(tree, (), (), allow_pickle)
        blobs: list[Blob] = []
        text = json.dumps(node, default=lambda blob: _name(blob, blobs), separators=(",", ":"), check_circular=False)
    except RecursionError:
        raise TreeError(error_text("encode_tree: no stack is left", fix="Call it from fewer nested calls.")) from None
    return _file({**{str(n): blob for n, blob in enumerate(blobs)}, "structure": plain_blob(text.encode("ascii"))})


def _name(blob: Blob, blobs: list[Blob]) -> str:
    blobs.append(blob)
    return str(len(blobs) - 1)


def _file(blobs: dict[str, Blob]) -> bytes:
    """Return the file of these entries: wide items first, so that each is aligned."""
    entries, start = [], 0
    ordered = dict(sorted(blobs.items(), key=lambda pair: -pair[1].item_size))
    for name, blob in ordered.items():
        stop = start + len(blob.data)
        entries.append(Entry(name, blob.tag, blob.shape, start, stop))
        start = stop
    return b"".join([encode_header(entries), *(blob.data for blob in ordered.values())])


def _node(value: Any, path: TreePath, parents: tuple[Any, ...], allow_pickle: bool) -> Node:
    """Return a value's node; `parents` are the values that hold it, outermost first."""
    if len(parents) > MAX_DEPTH:
        raise _too_deep(path, parents)
    if value is HOLE:
        return {"$": "hole"}

    def child(inner: Any, *steps: Any) -> Node:
        return _node(inner, path + steps, (*parents, value), allow_pickle)

    encoder = _ENCODERS.get(type(value))
    if encoder is not None:
        node = encoder(value, child)
        return _foreign(value, path, allow_pickle) if node is NotImplemented else node
    record = record_of(value)
    if record is None:
        return _foreign(value, path, allow_pickle)
    return {"$": "record", "type": child(record.type_name), "fields": child(dict(record.fields))}


def _foreign(value: Any, path: TreePath, allow_pickle: bool) -> Node:
    """Return the node of a value that only pickle can store."""
    what = f"encode_tree: {render_path(path_to(path))}"
    if not allow_pickle:
        if isinstance(value, torch.Tensor):
            check_storable(value.dtype, what)
        raise UnsupportedValue(error_text(f"{what} can't be stored", found=_described(value), fix=_FIX))
    try:
        return {"$": "pickle", "entry": plain_blob(pickle.dumps(value, protocol=4))}
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise UnsupportedValue(error_text(f"{what} can't be pickled", found=_described(value), fix=reason)) from error


_FIX = (
    "Store plain values made from it, or wrap it in LocalNonpersistentObject if it needn't be stored; "
    "allow_pickle=True stores it as a pickle, which runs code when it is loaded."
)


def _described(value: Any) -> str:
    """Return a value's type and what it is that can't be stored about it."""
    name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    factory = getattr(value, "default_factory", None)
    if isinstance(value, torch.Tensor):
        return f"{name} ({value.dtype}, {value.layout}, {value.device})"
    if factory is not None:
        return f"{name} whose factory is {getattr(factory, '__qualname__', type(factory).__qualname__)}, not a builtin"
    return f"{name} ({value.dtype})"[:200] if hasattr(value, "dtype") else name


def _too_deep(path: TreePath, parents: tuple[Any, ...]) -> TreeError:
    innermost = parents[-1]
    again = [position for position, parent in enumerate(parents) if parent is innermost]
    if len(again) > 1:
        where = render_path(path_to(path[: again[1]]))
        what = f"encode_tree: a {type(innermost).__name__} contains itself at {where}"
        return TreeError(error_text(what, fix="Break the cycle; a stored tree has none."))
    what = f"encode_tree: containers in containers, more than {MAX_DEPTH} deep, at {render_path(path_to(path))}"
    return TreeError(error_text(what, fix="Flatten the tree."))
