"""`encode_tree` and `decode_tree`: trees of plain values to and from the bytes of a safetensors file."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import (
    CheckpointingException,
    CorruptCheckpoint,
    TreeError,
    TreePath,
    UnsafeFile,
    UnsupportedValue,
    error_text,
)
from ..trees import HOLE, Record
from . import _arrays, _values
from ._addresses import stored_name
from ._dtypes import check_storable
from ._header import HeaderEntry, decode_header, encode_header, parse_json
from ._nodes import (
    MAX_DEPTH,
    Blob,
    Child,
    Decoder,
    Encoder,
    Node,
    Take,
    exactly,
    instance_of,
    named_types,
    plain_blob,
    plainer,
    record_of,
    shown_path,
)

# Encoding.

_ENCODERS: dict[type, Encoder] = {**_values.ENCODERS, **_arrays.ENCODERS}


def encode_tree(tree: Any, *, allow_pickle: bool = False) -> bytes:
    """Encode a tree of plain values as the bytes of a safetensors file, which `decode_tree` decodes.

    Each value comes back unchanged: None, numbers of any size, strings, bytes, ranges and slices, lists,
    tuples, sets, deques and dicts with any keys in their order, tensors, NumPy arrays and scalars, dtypes, devices,
    `io.BytesIO` with its position, paths, `argparse.Namespace`, `HOLE`. Tensors and parameters come back as plain
    tensors on the CPU without a gradient, and OrderedDicts without their attributes. A value that occurs twice
    is stored twice. Enum members, dataclasses and named tuples are stored as `Record`s.

    Args:
        tree: Any of these values in any of these containers, at most 100 deep.
        allow_pickle: Whether other values are stored as pickles, which run code when they are loaded.

    Raises:
        UnsupportedValue: A value is of another type.
        TreeError: The tree is nested more than 100 deep, or contains itself.

    Examples:
        >>> from shardtree.core.codec import decode_tree
        >>> decode_tree(encode_tree({"step": 7, "betas": (0.9, 0.95), "rng": torch.arange(3)}))
        {'step': 7, 'betas': (0.9, 0.95), 'rng': tensor([0, 1, 2])}
    """
    try:
        node = _node(tree, (), (), allow_pickle)
        blobs: list[Blob] = []
        text = json.dumps(
            node, default=lambda blob: _entry_name(blob, blobs), separators=(",", ":"), check_circular=False
        )
    except RecursionError:
        fix = "Call encode_tree from fewer nested calls."
        raise TreeError(error_text("encode_tree: too little of Python's recursion limit is left", fix=fix)) from None
    pairs = [*((str(n), blob) for n, blob in enumerate(blobs)), ("structure", plain_blob(text.encode("ascii")))]
    # Wide items come first, so that each entry is aligned to its items without padding between entries.
    pairs.sort(key=lambda pair: -pair[1].item_size)
    entries, start = [], 0
    for name, blob in pairs:
        stop = start + len(blob.data)
        entries.append(HeaderEntry(name, blob.tag, blob.shape, start, stop))
        start = stop
    return b"".join([encode_header(entries), *(blob.data for _, blob in pairs)])


def _entry_name(blob: Blob, blobs: list[Blob]) -> str:
    blobs.append(blob)
    return str(len(blobs) - 1)


def _node(value: Any, path: TreePath, parents: tuple[Any, ...], allow_pickle: bool) -> Node:
    """Return the JSON node of a value, which contains the nodes of its children.

    Args:
        value: Value to encode.
        path: Path of the value in the tree, for errors.
        parents: Containers around the value, outermost first.
        allow_pickle: Whether a value without an encoder is pickled.
    """
    if len(parents) > MAX_DEPTH:
        raise _too_deep(path, parents)
    if value is HOLE:
        return {"$": "hole"}

    def child(inner: Any, *steps: Any) -> Node:
        return _node(inner, path + steps, (*parents, value), allow_pickle)

    encoder = _ENCODERS.get(type(value))
    if encoder is not None:
        node = encoder(value, child)
        return _pickle_node(value, path, allow_pickle) if node is NotImplemented else node
    record = record_of(value)
    if record is None:
        return _pickle_node(value, path, allow_pickle)
    return {"$": "record", "type": child(record.type_name), "fields": child(dict(record.fields))}


def _pickle_node(value: Any, path: TreePath, allow_pickle: bool) -> Node:
    """Return a node that holds a value's pickle; raises if pickles aren't allowed or the value can't be pickled."""
    what = f"encode_tree: {shown_path(path)}"
    if not allow_pickle:
        if isinstance(value, torch.Tensor):
            check_storable(value.dtype, what)
        raise UnsupportedValue(error_text(f"{what} cannot be stored", found=_describe(value), fix=plainer(value)))
    try:
        return {"$": "pickle", "entry": plain_blob(pickle.dumps(value, protocol=4))}
    except Exception as error:
        what, fix = f"{what} cannot be pickled: {type(error).__name__}: {str(error)[:200]}", "Store plain values."
        raise UnsupportedValue(error_text(what, found=_describe(value), fix=fix)) from error


def _describe(value: Any) -> str:
    """Return a value's type as text for errors, with the property that can't be stored, such as a tensor's dtype."""
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
        where = shown_path(path[: again[1]])
        heading = f"encode_tree: a {type(innermost).__name__} contains itself at {where}"
        return TreeError(error_text(heading, fix="Break the cycle; a stored tree has none."))
    heading = f"encode_tree: containers nested more than {MAX_DEPTH} deep, at {shown_path(path)}"
    return TreeError(error_text(heading, fix="Flatten the tree."))


# Decoding of bytes that may be hostile.

_DECODERS: dict[str, Decoder] = {
    **_values.DECODERS,
    **_arrays.DECODERS,
    "hole": ((), lambda fields, child, take: HOLE),
}

_HOLE = {"$": "hole"}


@dataclass(frozen=True, slots=True)
class _Reader:
    """State that all nodes of a file share while it is decoded."""

    take: Take
    types: dict[str, type]
    allow_pickle: bool


def decode_tree(data: bytes | bytearray | memoryview, *, types: Iterable[type] = (), allow_pickle: bool = False) -> Any:
    """Decode the bytes of `encode_tree`, which may be untrusted.

    Nothing that the bytes name is imported, and no code in them runs unless `allow_pickle` is set.

    Args:
        data: The whole file. The tree shares no memory with it.
        types: Enums, dataclasses and named tuples whose instances are restored, without running `__init__`; instances
            of other classes become `Record`s.
        allow_pickle: Whether pickles are loaded. Set it only for files whose writer you trust.

    Raises:
        CorruptCheckpoint: The bytes aren't a file that `encode_tree` could have made.
        UnsafeFile: A value was stored as a pickle and `allow_pickle` isn't set.
        UnsupportedValue: A class in `types` has other fields now, or this torch lacks a dtype.

    Examples:
        >>> from http import HTTPStatus
        >>> from shardtree.core.codec import encode_tree
        >>> data = encode_tree([HTTPStatus.OK])
        >>> decode_tree(data)
        [Record(type_name='http.HTTPStatus', fields={'name': 'OK', 'value': 200})]
        >>> decode_tree(data, types=(HTTPStatus,))
        [<HTTPStatus.OK: 200>]
    """
    classes = named_types(types)
    view = memoryview(data).cast("B")
    entries, data_start = decode_header(view, len(view))
    left = {entry.name: (entry.tag, entry.shape, view[data_start:][entry.start : entry.stop]) for entry in entries}
    tag, shape, text = left.pop("structure", ("", (), memoryview(b"")))
    if tag != "U8" or len(shape) != 1:
        raise CorruptCheckpoint(error_text("decode_tree: the entry 'structure' is missing or is not plain bytes"))
    structure = parse_json(text, "decode_tree: structure")

    # Each entry can be taken once: otherwise a small file could use an entry a million times, and fill the memory.
    def take(name: Any) -> tuple[str, tuple[int, ...], memoryview]:
        if exactly(str, name) not in left:
            raise ValueError("an entry is missing or used twice")
        return left.pop(name)

    tree = _value(structure, (), 0, _Reader(take, classes, allow_pickle))
    if left:
        raise CorruptCheckpoint(error_text("decode_tree: entries that no value refers to", offenders=map(repr, left)))
    return tree


def _value(node: Node, path: TreePath, depth: int, reader: _Reader) -> Any:
    """Decode a node to its value.

    Args:
        node: Node of the file's JSON.
        path: Path of the value in the tree, for errors.
        depth: Number of containers around the value.
        reader: State shared by all nodes of the file.
    """
    kind = type(node)
    if kind is not dict and kind is not list:
        return node
    if node == _HOLE and depth <= MAX_DEPTH:
        return HOLE  # the fast path: most of a model's tree is holes
    try:
        if depth > MAX_DEPTH:
            raise ValueError(f"containers nested more than {MAX_DEPTH} deep")
        return _container(node, path, lambda inner, *steps: _value(inner, path + steps, depth + 1, reader), reader)
    except CheckpointingException:
        raise
    except (TypeError, ValueError, KeyError, OverflowError, RuntimeError, AttributeError) as error:
        heading = f"decode_tree: {shown_path(path)} is malformed: {str(error)[:200]}"
        raise CorruptCheckpoint(error_text(heading)) from error


def _container(node: Node, path: TreePath, child: Child, reader: _Reader) -> Any:
    if type(node) is list:
        return [child(item, position) for position, item in enumerate(node)]
    if "$" not in node:
        # Holes are handled here, without a call each: most of a model's tree is holes.
        return {key: HOLE if item == _HOLE else child(item, key) for key, item in node.items()}
    kind = exactly(str, node["$"])
    if kind == "record":
        return _record(_fields(node, ("type", "fields")), child, reader)
    if kind == "pickle":
        return _unpickle(_fields(node, ("entry",)), path, reader)
    if kind not in _DECODERS:
        raise ValueError(f"unknown kind {kind[:100]!r}; a newer release may have written it")
    names, decode = _DECODERS[kind]
    return decode(_fields(node, names), child, reader.take)


def _fields(node: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    if node.keys() != {"$", *names}:
        raise ValueError(f"expected exactly the members {names} beside the kind {node['$'][:100]!r}")
    return node


def _record(fields: dict[str, Any], child: Child, reader: _Reader) -> Any:
    record = Record(stored_name(exactly(str, child(fields["type"]))), _values.decode_fields(fields["fields"], child))
    cls = reader.types.get(record.type_name)
    return record if cls is None else instance_of(record, cls)


def _unpickle(fields: dict[str, Any], path: TreePath, reader: _Reader) -> Any:
    where = shown_path(path)
    _, _, data = reader.take(fields["entry"])
    if not reader.allow_pickle:
        fix = "Pass options=LoadOptions(allow_pickle=True) if you trust its writer."
        raise UnsafeFile(error_text(f"decode_tree: {where} is a pickle, which runs code when it is loaded", fix=fix))
    try:
        return pickle.loads(data)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise CorruptCheckpoint(error_text(f"decode_tree: {where} cannot be unpickled: {reason}")) from error
