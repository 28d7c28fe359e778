"""A plan as text: tables of bytes per rank, link and step, and of each tensor's origins; and the plan as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...core.geometry import Column, box_slices, group_sums
from ...core.layouts import ShardColumns, TensorKind, place_text
from ...core.mapping import ShardedTensor, ShardedTensorFactory
from ...core.offences import offence_lines
from ...core.trees import leaves_with_paths, near_names, path_key
from ...errors import KeyMismatch, MetadataError, error_text, plural, shorten, size_text, table_lines
from ._check import check_sizes, transfer_problems
from ._transfers import Transfers

# Totals of ranks, links and steps.

_SHOWN_RANKS = 32
_SHOWN_LINKS = 5
_SHOWN_STEPS = 32


def totals_table(sends: Mapping[int, int], gets: Mapping[int, int], keeps: Mapping[int, int]) -> list[str]:
    """Return the lines of a table of bytes: a heading, a line for each rank, up to 32 of them, and one of totals.

    Args:
        sends: Sent bytes by rank; the other mappings have the same ranks.
        gets: Received bytes by rank.
        keeps: Kept bytes by rank.

    Examples:
        >>> for line in totals_table({0: 8, 1: 0}, {0: 0, 1: 8}, {0: 0, 1: 0}):
        ...     print(line)
        rank  sends  gets  keeps
           0    8 B   0 B    0 B
           1    0 B   8 B    0 B
         all    8 B   8 B    0 B
    """
    columns = (sends, gets, keeps)
    rows: list[Sequence[str]] = [(str(rank), *(size_text(column[rank]) for column in columns)) for rank in sends]
    every = ("all", *(size_text(sum(column.values())) for column in columns))
    heading, *lines, last = table_lines([("rank", "sends", "gets", "keeps"), *rows, every])
    return [heading, *shorten(lines, _SHOWN_RANKS), last]


def link_lines(links: Mapping[tuple[int, int], int]) -> list[str]:
    """Return a line that counts the links and names those with the most bytes; no line if there are no links.

    Args:
        links: Bytes by (sender, receiver).

    Examples:
        >>> link_lines({(0, 1): 8, (1, 0): 16})
        ['2 links: 1 → 0 16 B, 0 → 1 8 B']
    """
    largest = sorted(links.items(), key=lambda link: (-link[1], link[0]))
    texts = shorten((f"{one} → {other} {size_text(count)}" for (one, other), count in largest), _SHOWN_LINKS)
    return [f"{plural(len(links), 'link')}: {', '.join(texts)}"] if links else []


def cast_lines(casts: Iterable[tuple[torch.dtype, torch.dtype]]) -> list[str]:
    """Return a line that counts the tensors that are cast, in total and by dtypes; no line if there are none.

    Args:
        casts: Dtypes before and after, for each tensor that is cast.

    Examples:
        >>> cast_lines([(torch.float32, torch.bfloat16)] * 2 + [(torch.int64, torch.int32)])
        ['3 tensors are cast at the sender: float32 → bfloat16 (2), int64 → int32 (1)']
    """
    count = Counter(casts)
    texts = shorten((f"{cast_text(*pair)} ({number})" for pair, number in count.most_common()), _SHOWN_LINKS)
    total = count.total()
    verb = "is" if total == 1 else "are"
    return [f"{plural(total, 'tensor')} {verb} cast at the sender: {', '.join(texts)}"] if total else []


def cast_text(before: torch.dtype, after: torch.dtype) -> str:
    """Return the text of a cast between two dtypes.

    Examples:
        >>> cast_text(torch.float32, torch.bfloat16)
        'float32 → bfloat16'
    """
    return " → ".join(str(dtype).removeprefix("torch.") for dtype in (before, after))


def steps_table(step: Column, from_rank: Column, to_rank: Column, nbytes: Column) -> list[str]:
    """Return the lines of a table: each step's bytes, and the rank with the largest sum of sent and received bytes.

    At most 32 steps are listed. The arguments are columns of a `Schedule`.

    Args:
        step: Step of each piece, ascending, int64 (pieces,).
        from_rank: Sender of each piece, int64 (pieces,).
        to_rank: Receiver of each piece, int64 (pieces,).
        nbytes: Size of each piece in bytes, int64 (pieces,).

    Examples:
        >>> for line in steps_table(*map(np.array, ([0, 0, 1], [0, 1, 0], [1, 2, 2], [8, 4, 2]))):
        ...     print(line)
        step  moves  fullest rank
           0   12 B  rank 1: 12 B
           1    2 B   rank 0: 2 B
    """
    steps, first = np.unique(step, return_index=True)
    rows = [("step", "moves", "fullest rank")]
    for number, begin, end in zip(steps.tolist()[:_SHOWN_STEPS], first, [*first[1:], step.size], strict=False):
        ranks, place = np.unique(np.stack([from_rank[begin:end], to_rank[begin:end]]), return_inverse=True)
        load = group_sums(place.ravel(), np.tile(nbytes[begin:end], 2), ranks.size)
        fullest = int(load.argmax())
        most = f"rank {ranks[fullest]}: {size_text(int(load[fullest]))}"
        rows.append((str(number), size_text(int(nbytes[begin:end].sum())), most))
    more = steps.size - _SHOWN_STEPS
    return [*table_lines(rows), *([f"and {more} more"] if more > 0 else [])]


# The origin of each box of a tensor.

_SHOWN_ORIGINS = 40


@dataclass(frozen=True, slots=True)
class Origin:
    """A box of a tensor that a rank receives, and the rank that it comes from.

    Attributes:
        rank: Receiver.
        from_rank: Rank that the box comes from; the receiver itself if the box stays.
        box: Slices of the global tensor.
        nbytes: Size in bytes.
        hop: 0 if the box comes from a source shard; 1 or more if it comes from a target shard that was filled before.
        key: Key of the tensor.
    """

    rank: int
    from_rank: int
    box: tuple[slice, ...]
    nbytes: int
    hop: int
    key: str


@dataclass(frozen=True, slots=True)
class Provenance:
    """The origin of each box of a tensor, on every rank. Its text is a table.

    Attributes:
        name: Requested name: the tensor's key, its path in the target's trees, or a factory's key.
        kinds: Dtype and global shape in the target, by key. If the name is a factory's key, they are those of all
            tensors that the factory builds.
        origins: Boxes of the tensor, ordered by key, rank, then box.
        casts: Dtypes before and after of tensors that are cast, by key.
    """

    name: str
    kinds: Mapping[str, TensorKind]
    origins: tuple[Origin, ...]
    casts: Mapping[str, tuple[torch.dtype, torch.dtype]] = field(default_factory=dict)

    @property
    def bytes_moved(self) -> int:
        """Bytes of the tensor that move between ranks."""
        return sum(one.nbytes for one in self.origins if one.rank != one.from_rank)

    @property
    def bytes_kept(self) -> int:
        """Bytes of the tensor that stay on their rank."""
        return sum(one.nbytes for one in self.origins if one.rank == one.from_rank)

    def __str__(self) -> str:
        moves, stays = size_text(self.bytes_moved), size_text(self.bytes_kept)
        kinds = ", ".join(f"{key!r} {kind}" for key, kind in self.kinds.items())
        of = kinds if self.name in self.kinds else f"{self.name!r}, which is {kinds}"
        rows = [("rank", "gets", "bytes", "from"), *map(_row, self.origins)]
        if len(self.kinds) > 1:
            rows = [(*row, key) for row, key in zip(rows, ["of", *(one.key for one in self.origins)], strict=True)]
        heading, *lines = table_lines(rows)
        casts = "".join(f", {text}" for text in dict.fromkeys(cast_text(*dtypes) for dtypes in self.casts.values()))
        return "\n".join([f"{of}: {moves} move, {stays} stay{casts}", heading, *shorten(lines, _SHOWN_ORIGINS)])


def _row(one: Origin) -> tuple[str, ...]:
    whom = "itself" if one.rank == one.from_rank else f"rank {one.from_rank}"
    return str(one.rank), place_text(one.box), size_text(one.nbytes), whom + (" (passed on)" if one.hop else "")


def names_of_tensors(trees: Iterable[tuple[Any, Any]]) -> dict[str, tuple[str, ...]]:
    """Return the keys of tensors by other names: paths in the trees, and keys of factories.

    A name has several keys if a factory builds several tensors, for example.

    Args:
        trees: A pair for each rank: its tree, and the result of `apply_factories` on it.

    Examples:
        >>> import torch
        >>> tree = {"model": {"up": ShardedTensor.from_rank_offsets("w", torch.zeros(2))}}
        >>> names_of_tensors([(tree, tree)])
        {'model.up': ('w',)}
    """
    names: dict[str, dict[str, None]] = {}
    for tree, after in trees:
        pairs = leaves_with_paths(tree)
        factories = {path: leaf.key for path, leaf in pairs if isinstance(leaf, ShardedTensorFactory)}
        depths = sorted(set(map(len, factories)))
        for path, leaf in leaves_with_paths(after):
            if not isinstance(leaf, ShardedTensor):
                continue
            # Users know a factory's path and key, but not those of the shards that it builds.
            place = next((path[:depth] for depth in depths if path[:depth] in factories), path)
            for name in {path_key(place), factories.get(place, leaf.key)} - {leaf.key}:
                names.setdefault(name, {})[leaf.key] = None
    return {name: tuple(keys) for name, keys in names.items()}


def tensor_origins(
    target: ShardColumns,
    transfers: Transfers,
    name: str,
    names: Mapping[str, tuple[str, ...]],
    casts: Mapping[str, tuple[torch.dtype, torch.dtype]],
) -> Provenance:
    """Return the origins of a tensor's bytes, or of the bytes of all tensors that a factory builds.

    Args:
        target: Shards of all ranks after the resharding.
        transfers: All transfers of the plan.
        name: Key of a tensor, or a name in `names`.
        names: Keys of tensors by other names (paths in the target's trees, keys of factories).
        casts: Dtypes before and after of tensors that are cast, by key.

    Raises:
        KeyMismatch: No shard of the target belongs to such a tensor.
    """
    keys = (name,) if name in target.keys else names.get(name)
    if keys is None:
        near = near_names([name], [*target.keys, *names])
        fix = f"Did you mean {near[name]!r}?" if near else "Ask for one of the keys of plan.target."
        raise KeyMismatch(error_text(f"explain: no tensor {name!r} in the target", fix=fix))
    kinds = {key: target.kinds[target.keys.index(key)] for key in keys}
    origins = tuple(origin for key in keys for origin in _origins(target, transfers, key))
    # Several keys share a name if a factory stores one tensor as several.
    return Provenance(name, kinds, origins, {key: casts[key] for key in keys if key in casts})


def _origins(target: ShardColumns, transfers: Transfers, key: str) -> Iterable[Origin]:
    number = target.keys.index(key)
    rows = np.flatnonzero(transfers.key == number)
    rows = rows[np.lexsort((*transfers.offset[rows].T[::-1], transfers.to_rank[rows]))]
    boxes = zip(transfers.offset[rows], transfers.shape[rows], strict=True)
    columns = (getattr(transfers, name)[rows].tolist() for name in ("to_rank", "from_rank", "nbytes", "hop"))
    axes = len(target.kinds[number].global_shape)
    for (offset, shape), rank, sender, nbytes, hop in zip(boxes, *columns, strict=True):
        yield Origin(rank, sender, box_slices(offset, shape, axes), nbytes, hop, key)


# A plan as a JSON document, which another program can execute, and which reads back as the same plan.

FORMAT, VERSION = "shardtree.ReshardPlan", 1

_SHARD_COLUMNS = ("key", "rank", "offset", "shape", "start", "stop", "main")
_BOXES = ("offset", "shape", "source_stride", "target_stride")  # columns of a number for each axis


Parts = tuple[ShardColumns, ShardColumns, Transfers, Mapping[str, tuple[str, ...]]]
"""Parts of a plan: source, target, transfers and names, the fields of `ReshardPlan`."""


def plan_text(plan: Parts) -> str:
    """Return a plan as JSON text; docs/resharding.md describes it."""
    source, target, transfers, names = plan
    document = {
        "format": FORMAT,
        "version": VERSION,
        "axes": target.offset.shape[1],
        "source": _layout_record(source),
        "target": _layout_record(target),
        "transfers": {field.name: getattr(transfers, field.name).tolist() for field in fields(Transfers)},
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
    """Return the arguments of a `ReshardPlan` from its JSON text, after checking that the plan fills its target.

    Raises:
        MetadataError: The text isn't a plan of this version, or the plan doesn't fill its target.
        ShapeError: A side has 2**62 bytes or more.
    """
    try:
        document = json.loads(text)
        version = document.get("format"), document.get("version")
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise _refusal(str(error)[:200]) from None
    if version != (FORMAT, VERSION):
        raise _refusal(f"{version[0]!r} of version {version[1]!r}"[:200])
    try:
        parts = _parts(document)
    except (KeyError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise _refusal(f"{type(error).__name__}: {error}"[:200]) from None
    source, target, transfers, _ = parts
    check_sizes(source, target)
    problems = transfer_problems(source, target, transfers)
    if problems:
        heading = "ReshardPlan.from_json: the plan does not fill its target"
        raise MetadataError(
            error_text(heading, offenders=offence_lines(problems), fix="Write it with `to_json` again.")
        )
    return parts


def _refusal(problem: str) -> MetadataError:
    heading, fix = "ReshardPlan.from_json: the text is not a readable plan", "Pass the result of `to_json`."
    return MetadataError(error_text(heading, found=problem, expected=f"{FORMAT!r} of version {VERSION}", fix=fix))


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
        raise ValueError("keys of tensors are not sorted, or one occurs twice")
    if np.any((columns["key"] < 0) | (columns["key"] >= len(kinds))):
        raise ValueError("a shard belongs to a tensor that is not listed")
    return ShardColumns(tuple(kinds), tuple(kinds.values()), **columns)


def _kind(record: Mapping[str, Any]) -> TensorKind:
    # getattr isn't used: for some names it would import whole modules of torch.
    dtype = vars(torch).get(record["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"this torch has no dtype {record['dtype']!r}")
    shape: Sequence[int] = record["shape"]
    return TensorKind(dtype, tuple(map(int, shape)), int(record["prepend_axis_num"]))


def _column(record: Mapping[str, Any], name: str, axes: int) -> NDArray[Any]:
    values = np.asarray(record[name] or np.zeros(0, dtype=np.int64))
    # Conversion to an integer dtype would cut off fractions.
    if values.dtype.kind != ("b" if name == "main" and values.size else "i"):
        raise ValueError(f"column {name!r} has {values.dtype} values")
    shape = (len(record[name]), axes) if name in _BOXES else (len(record[name]),)
    return values.reshape(shape).astype(np.bool_ if name == "main" else np.int64)


def _check_lengths(what: str, columns: Mapping[str, NDArray[Any]]) -> None:
    if len({len(column) for column in columns.values()}) != 1:
        raise ValueError(f"columns of {what} have different lengths")
