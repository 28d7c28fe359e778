"""A resharding plan as a JSON document, which another program can execute, and which reads back as the same plan."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import MetadataError, error_text
from ...layouts import ShardColumns, TensorKind, problem_lines
from ._check import check_sizes, transfer_problems
from ._transfers import Transfers

FORMAT, VERSION = "shardtree.ReshardPlan", 1

_SHARD_COLUMNS = ("key", "rank", "offset", "shape", "start", "stop", "main")
_BOXES = ("offset", "shape", "source_stride", "target_stride")  # columns of a number for each axis


Parts = tuple[ShardColumns, ShardColumns, Transfers, Mapping[str, tuple[str, ...]]]
"""What a plan consists of: source, target, transfers and names, the fields of `ReshardPlan`."""


def plan_text(plan: Parts) -> str:
    """Return a plan as JSON text; docs/resharding.md describes it."""
    source, target, transfers, names = plan
    document = {
        "format": FORMAT,
        "version": VERSION,
        "axes": target.offset.shape[1],
        "source": _layout_record(source),
        "target": _layout_record(target),
        "transfers": {one.name: getattr(transfers, one.name).tolist() for one in fields(Transfers)},
        "names": {name: list(keys) for name, keys in names.items()},
    }
    return json.dumps(document)


def _layout_record(columns: ShardColumns) -> dict[str, Any]:
    return {
        "tensors": [_kind_record(key, kind) for key, kind in zip(columns.keys, columns.kinds, strict=True)],
        "shards": {name: getattr(columns, name).tolist() for name in _SHARD_COLUMNS},
    }


def _kind_record(key: str, kind: TensorKind) -> dict[str, Any]:
    dtype = str(kind.dtype).removeprefix("torch.")
    return {"key": key, "dtype": dtype, "shape": kind.global_shape, "prepend_axis_num": kind.prepend_axis_num}


def plan_parts(text: str) -> Parts:
    """Return what a plan consists of, from its JSON text.

    Raises:
        MetadataError: it isn't the text of a plan of this version, or the plan doesn't fill its target.
        ShapeError: a side has 2**62 bytes or more.
    """
    try:
        document = json.loads(text)
        version = document.get("format"), document.get("version")
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise _refusal(str(error)[:200]) from None
    if version != (FORMAT, VERSION):
        raise _refusal(f"{version[0]!r} {version[1]!r}"[:200])
    try:
        parts = _parts(document)
    except (KeyError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise _refusal(f"{type(error).__name__}: {error}"[:200]) from None
    source, target, transfers, _ = parts
    check_sizes(source, target)
    problems = transfer_problems(source, target, transfers)
    if problems:
        what = "ReshardPlan.from_json: the plan doesn't fill its target"
        raise MetadataError(error_text(what, offenders=problem_lines(problems), fix="Write it with `to_json` again."))
    return parts


def _refusal(found: str) -> MetadataError:
    what, fix = "ReshardPlan.from_json: not a plan that can be read", "Pass what `ReshardPlan.to_json` returns."
    return MetadataError(error_text(what, found=found, expected=f"{FORMAT!r} {VERSION}", fix=fix))


def _parts(document: Mapping[str, Any]) -> Parts:
    axes = int(document["axes"])
    columns = {one.name: _column(document["transfers"], one.name, axes) for one in fields(Transfers)}
    _check_lengths("transfers", columns)
    names = {str(name): tuple(map(str, keys)) for name, keys in document["names"].items()}
    source, target = _layout(document["source"], axes), _layout(document["target"], axes)
    return source, target, Transfers(**columns), names


def _layout(record: Mapping[str, Any], axes: int) -> ShardColumns:
    kinds = {str(one["key"]): _kind(one) for one in record["tensors"]}
    columns: dict[str, Any] = {name: _column(record["shards"], name, axes) for name in _SHARD_COLUMNS}
    _check_lengths("shards", columns)
    if list(kinds) != sorted(kinds) or len(kinds) != len(record["tensors"]):
        raise ValueError("keys of tensors aren't sorted, or one occurs twice")
    if np.any((columns["key"] < 0) | (columns["key"] >= len(kinds))):
        raise ValueError("a shard of a tensor that isn't listed")
    return ShardColumns(tuple(kinds), tuple(kinds.values()), **columns)


def _kind(record: Mapping[str, Any]) -> TensorKind:
    # Not getattr, which imports whole modules of torch for some names.
    dtype = vars(torch).get(record["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"this torch has no dtype {record['dtype']!r}")
    shape: Sequence[int] = record["shape"]
    return TensorKind(dtype, tuple(map(int, shape)), int(record["prepend_axis_num"]))


def _column(record: Mapping[str, Any], name: str, axes: int) -> NDArray[Any]:
    values = np.asarray(record[name] or np.zeros(0, dtype=np.int64))
    # numpy would cut off fractions.
    if values.dtype.kind != ("b" if name == "main" and values.size else "i"):
        raise ValueError(f"column {name!r} has {values.dtype} values")
    expected = (len(record[name]), axes) if name in _BOXES else (len(record[name]),)
    return values.reshape(expected).astype(np.bool_ if name == "main" else np.int64)


def _check_lengths(what: str, columns: Mapping[str, NDArray[Any]]) -> None:
    if len({len(column) for column in columns.values()}) != 1:
        raise ValueError(f"columns of {what} have different lengths")
