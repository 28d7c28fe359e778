"""`decode_tree`: the bytes of a safetensors file, perhaps a hostile one, as the tree that `encode_tree` was given."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointingException, CorruptCheckpoint, TreePath, UnsafeFile, error_text, render_path
from ..trees import HOLE, Record
from . import _arrays, _containers, _scalars
from ._containers import decode_fields
from ._header import decode_header
from ._json import parse_json
from ._nodes import MAX_DEPTH, Child, Decoder, Node, Take, exactly, path_to, step_of
from ._record import instance_of, named_types

_DECODERS: dict[str, Decoder] = {
    **_scalars.DECODERS,
    **_containers.DECODERS,
    **_arrays.DECODERS,
    "hole": ((), lambda fields, child, take: HOLE),
}

_HOLE = {"$": "hole"}


@dataclass(frozen=True, slots=True)
class _Reader:
    """What stays the same throughout a file."""

    take: Take
    types: dict[str, type]
    allow_pickle: bool


def decode_tree(data: bytes | bytearray | memoryview, *, types: Iterable[type] = (), allow_pickle: bool = False) -> Any:
    """Return the tree that `encode_tree` was given; the bytes may come from anyone.

    Nothing is imported because the bytes name it, and no code in them runs unless `allow_pickle` is given.

    Args:
        data: a whole file. The tree shares no memory with it.
        types: enums, dataclasses and named tuples whose instances become instances again, as they were and without
            running `__init__`; those of other classes become `Record`s.
        allow_pickle: unpickle what was stored as a pickle. Only for files whose writer you trust.

    Raises:
        CorruptCheckpoint: the bytes aren't such a file.
        UnsafeFile: a value was stored as a pickle and `allow_pickle` isn't given.
        UnsupportedValue: a class in `types` has other fields now, or a dtype isn't in this torch.

    Examples:
        >>> from http import HTTPStatus
        >>> from shardtree.codec import encode_tree
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
        raise CorruptCheckpoint(error_text("decode_tree: no entry 'structure' of bytes"))
    structure = parse_json(text, "decode_tree: structure")
    tree = _value(structure, (), 0, _Reader(_take_once(left), classes, allow_pickle))
    if left:
        raise CorruptCheckpoint(error_text("decode_tree: entries that no value refers to", offenders=map(repr, left)))
    return tree


def _take_once(left: dict[str, tuple[str, tuple[int, ...], memoryview]]) -> Take:
    """Return what hands out each entry once: a small file must not become a large tree."""

    def take(name: Any) -> tuple[str, tuple[int, ...], memoryview]:
        if exactly(str, name) not in left:
            raise ValueError("an entry that isn't there, or is used twice")
        return left.pop(name)

    return take


def _value(node: Node, path: TreePath, depth: int, reader: _Reader) -> Any:
    """Return a node's value; `depth` counts the containers around it."""
    kind = type(node)
    if kind is not dict and kind is not list:
        return node
    if node == _HOLE and depth <= MAX_DEPTH:
        return HOLE  # what most of a model's tree is
    try:
        if depth > MAX_DEPTH:
            raise ValueError(f"containers in containers, more than {MAX_DEPTH} deep")
        return _container(node, path, lambda inner, *steps: _value(inner, path + steps, depth + 1, reader), reader)
    except CheckpointingException:
        raise
    except (TypeError, ValueError, KeyError, OverflowError, RuntimeError, AttributeError) as error:
        what = f"decode_tree: {render_path(path_to(path))} is malformed: {str(error)[:200]}"
        raise CorruptCheckpoint(error_text(what)) from error


def _container(node: Node, path: TreePath, child: Child, reader: _Reader) -> Any:
    if type(node) is list:
        return [child(item, position) for position, item in enumerate(node)]
    if "$" not in node:
        # Holes at once: they are what most of a model's tree is.
        return {key: HOLE if item == _HOLE else child(item, step_of(key)) for key, item in node.items()}
    kind = exactly(str, node["$"])
    if kind == "record":
        return _record(_fields(node, ("type", "fields")), child, reader)
    if kind == "pickle":
        return _unpickled(_fields(node, ("entry",)), path, reader)
    if kind not in _DECODERS:
        raise ValueError(f"unknown kind {kind[:100]!r}; a newer release may have written it")
    names, decode = _DECODERS[kind]
    return decode(_fields(node, names), child, reader.take)


def _fields(node: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    if node.keys() != {"$", *names}:
        raise ValueError(f"not the members {names} beside the kind {node['$'][:100]!r}")
    return node


def _record(fields: dict[str, Any], child: Child, reader: _Reader) -> Any:
    record = Record(exactly(str, child(fields["type"])), decode_fields(fields["fields"], child))
    cls = reader.types.get(record.type_name)
    return record if cls is None else instance_of(record, cls)


def _unpickled(fields: dict[str, Any], path: TreePath, reader: _Reader) -> Any:
    where = render_path(path_to(path))
    _, _, data = reader.take(fields["entry"])
    if not reader.allow_pickle:
        fix = "Pass allow_pickle=True if you trust whoever wrote it."
        raise UnsafeFile(error_text(f"decode_tree: {where} is a pickle, which runs code when it is loaded", fix=fix))
    try:
        return pickle.loads(data)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise CorruptCheckpoint(error_text(f"decode_tree: {where} can't be unpickled: {reason}")) from error
