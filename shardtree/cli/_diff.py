"""`shardtree diff`: the differences between two checkpoints of any formats and cuts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..core.codec import dtype_from_name, dtype_name
from ..core.layouts import TensorKind
from ..core.trees import Difference, Record
from ..errors import TreePath, plural, render_path
from ..inspection import (
    CheckpointDifference,
    KindDifference,
    OpenCheckpoint,
    ValueDifference,
    compare,
    open_checkpoint,
)
from ..shell.table import LoadOptions, Strategies, StrategyAction, default_strategies
from ._contents import StoredContents, TensorRow, brief, check_patterns, contents_at, kind_of, matcher, plain, select
from ._output import Heading, Output, Table, bar, json_text, show_table, show_verdict, size, working

# The output is tables for people, or a document for programs.

_VALUES = (
    Heading("other values", style="bold"),
    Heading("differ", right=True, style="yellow"),
    Heading("of", right=True),
    Heading("by at most", right=True),
    Heading("first at", right=True),
    Heading("A", right=True, style="red"),
    Heading("B", right=True, style="green"),
)


_NAMES = ("key", "count", "elements", "first", "left", "right", "largest")  # of a tensor's differences, in JSON


@dataclass(frozen=True, slots=True)
class DiffSide:
    """One of the two checkpoints that are compared.

    Attributes:
        where: Name of the checkpoint, as the user typed it.
        tree: Open checkpoint.
        contents: Tensors and objects that were compared.
    """

    where: str
    tree: OpenCheckpoint
    contents: StoredContents


@dataclass(frozen=True, slots=True)
class ComparedPair:
    """Two checkpoints and their differences.

    Attributes:
        left: Left checkpoint.
        right: Right checkpoint.
        difference: Differences between them.
        only_structure: True if no values were compared.
        is_selection: True if only some keys were compared, and no common state.
    """

    left: DiffSide
    right: DiffSide
    difference: CheckpointDifference
    only_structure: bool
    is_selection: bool


def difference_tables(outcome: ComparedPair) -> Iterator[Table]:
    """Yield a table for each kind of difference that was found."""
    apart = outcome.difference
    if apart.only_left:
        yield _only("A", apart.only_left, outcome.left.contents)
    if apart.only_right:
        yield _only("B", apart.only_right, outcome.right.contents)
    if apart.kinds:
        kinds = [(kind.key, _kind_text(kind.left), _kind_text(kind.right)) for kind in apart.kinds]
        yield _pairs("other dtype or shape", kinds)
    if apart.values:
        yield Table(_VALUES, list(map(_value_cells, apart.values)))
    for unique_key, difference in apart.objects.items():
        sides = [side.tree[unique_key].data for side in (outcome.left, outcome.right)]
        yield _pairs("other object", list(_places(unique_key, difference, *sides)))
    if apart.common:
        sides = [side.tree.common() for side in (outcome.left, outcome.right)]
        yield _pairs("other common state", list(_places("common", apart.common, *sides)))


def document(outcome: ComparedPair) -> dict[str, Any]:
    """Return the document that `--json` prints."""
    apart = outcome.difference
    return {
        "left": outcome.left.where,
        "right": outcome.right.where,
        "equal": not apart,
        "bytes_compared": apart.nbytes,
        "only_left": list(apart.only_left),
        "only_right": list(apart.only_right),
        "kinds": [{"key": kind.key, "left": _kind(kind.left), "right": _kind(kind.right)} for kind in apart.kinds],
        "values": [{name: plain(getattr(value, name)) for name in _NAMES} for value in apart.values],
        "objects": [{"unique_key": key, **_paths(difference)} for key, difference in apart.objects.items()],
        "common": _paths(apart.common),
    }


def value_at(tree: Any, path: TreePath) -> Any:
    """Return the value at a path in a tree; the path may lead through mappings, sequences and attributes of objects.

    Examples:
        >>> from argparse import Namespace
        >>> value_at({"args": Namespace(lr=[0.1])}, ("args", "lr", 0)), value_at(deque([0.1]), (0,))
        (0.1, 0.1)
    """
    for entry in path:
        # A record stands for an object whose class isn't imported: its fields are entries, and "" is its type's name.
        if isinstance(tree, Record):
            tree = tree.type_name if entry == "" else tree.fields[entry]
        elif isinstance(tree, Mapping | list | tuple | deque):
            tree = tree[entry]
        else:
            tree = getattr(tree, entry)
    return tree


def _only(name: str, keys: tuple[str, ...], contents: StoredContents) -> Table:
    rows = {row.key: f"{row.dtype} {row.shape}" for row in contents.tensors}
    style = {"A": "red", "B": "green"}[name]
    headings = (Heading(f"only in {name}", style=f"bold {style}"), Heading(""))
    return Table(headings, [(key, rows.get(key, "object")) for key in keys])


def _pairs(name: str, rows: list[tuple[str, str, str]]) -> Table:
    return Table((Heading(name, style="bold"), Heading("A", style="red"), Heading("B", style="green")), rows)


def _value_cells(value: ValueDifference) -> tuple[str, ...]:
    left, right = (f"{side:.9g}" if isinstance(side, float) else str(side) for side in (value.left, value.right))
    # Nine digits distinguish any two float32 numbers; other dtypes may need all digits.
    if left == right:
        left, right = repr(value.left), repr(value.right)
    largest = f"{value.largest:.3g}" if isinstance(value.largest, float) else str(value.largest or "")
    return value.key, f"{value.count:,}", f"{value.elements:,}", largest, str(value.first), left, right


def _places(root: str, difference: Difference, left: Any, right: Any) -> Iterator[tuple[str, str, str]]:
    yield from ((render_path(path, root), _brief(left, path), "") for path in difference.only_left)
    yield from ((render_path(path, root), "", _brief(right, path)) for path in difference.only_right)
    yield from ((render_path(path, root), _brief(left, path), _brief(right, path)) for path in difference.mismatch)


def _brief(tree: Any, path: TreePath) -> str:
    try:
        value = value_at(tree, path)
    except (LookupError, AttributeError, TypeError):
        return "?"  # The difference is shown without the value.
    return brief(value) or kind_of(value)


def summary(outcome: ComparedPair) -> str:
    """Return a sentence about the differences between two checkpoints."""
    # The sentence only has the kinds of differences that occur, so that it stays short.
    apart, sides = outcome.difference, f"{outcome.left.where} and {outcome.right.where}"
    if not apart:
        contents = outcome.left.contents
        tensors, objects = plural(len(contents.tensors), "tensor"), plural(len(contents.objects), "object")
        if outcome.only_structure:
            return f"{sides} have the same keys, dtypes and shapes: {tensors}, {objects}; no value was compared"
        more = "" if outcome.is_selection else ", the common state"
        return f"{sides} are equal, bit for bit: {tensors}, {size(apart.nbytes)}, {objects}{more}"
    common = sum(map(len, (apart.common.only_left, apart.common.only_right, apart.common.mismatch)))
    counts = {
        f"{plural(len(apart.only_left), 'key')} only in A": apart.only_left,
        f"{plural(len(apart.only_right), 'key')} only in B": apart.only_right,
        f"{plural(len(apart.kinds), 'tensor')} of another dtype or shape": apart.kinds,
        f"{plural(len(apart.values), 'tensor')} with other values": apart.values,
        f"{plural(len(apart.objects), 'object')} with other values": apart.objects,
        f"the common state in {plural(common, 'place')}": apart.common,
    }
    return f"{sides} differ: " + ", ".join(words for words, there in counts.items() if there)


def _kind_text(kind: TensorKind) -> str:
    return f"{dtype_name(kind.dtype)} {kind.global_shape}"


def _kind(kind: TensorKind) -> dict[str, Any]:
    return {"dtype": dtype_name(kind.dtype), "shape": kind.global_shape}


def _paths(difference: Difference) -> dict[str, list[str]]:
    sides = {"only_left": difference.only_left, "only_right": difference.only_right, "mismatch": difference.mismatch}
    return {name: [render_path(path, "") for path in paths] for name, paths in sides.items()}


def run_diff(
    left: str, right: str, *, patterns: Sequence[str], only_structure: bool, as_json: bool, allow_pickle: bool
) -> int:
    """Print the differences between two checkpoints, and return the exit status: 0 if they are equal, else 1.

    Args:
        left: Path or URL of the left checkpoint.
        right: Path or URL of the right checkpoint.
        patterns: Patterns of the keys to compare; none compares all keys and the common state.
        only_structure: True to compare only keys, dtypes and shapes.
        as_json: True to print JSON.
        allow_pickle: True to unpickle pickled values.

    Raises:
        CheckpointingException: A checkpoint can't be read.
    """
    with working("reading what is stored"):
        options = LoadOptions(allow_pickle=allow_pickle)
        checkpoints = [(where, open_checkpoint(where, options=options)) for where in (left, right)]
    outcome = difference_of(checkpoints, patterns, only_structure=only_structure)
    if as_json:
        print(json_text(document(outcome)))
    else:
        console = Output()
        for table in difference_tables(outcome):
            show_table(console, table.headings, table.rows)
            console.print()
        show_verdict(console, not outcome.difference, summary(outcome))
    return 1 if outcome.difference else 0


def difference_of(
    checkpoints: Sequence[tuple[str, OpenCheckpoint]], patterns: Sequence[str] = (), *, only_structure: bool
) -> ComparedPair:
    """Return the differences between two checkpoints, and show a bar while values are read.

    Args:
        checkpoints: Both checkpoints, with their names for the output.
        patterns: Patterns of the keys to compare; none compares all keys and the common state.
        only_structure: True to compare only keys, dtypes and shapes.

    Raises:
        CheckpointingException: A value can't be read.
    """
    with working("reading what is stored"):
        everything = [contents_at(tree) for _, tree in checkpoints]
    check_patterns("diff", patterns, *everything)
    pairs = zip(checkpoints, everything, strict=True)
    sides = [DiffSide(where, tree, select(contents, patterns)) for (where, tree), contents in pairs]
    if only_structure:
        difference = structure_difference(*(side.contents for side in sides))
    else:
        # The bar's total leaves out tensors whose dtypes or shapes differ, since their values aren't read.
        kinds = {row.key: (row.dtype, row.shape) for row in sides[1].contents.tensors}
        both = [row for row in sides[0].contents.tensors if kinds.get(row.key) == (row.dtype, row.shape)]
        with bar(Output(stderr=True), "compare", sum(row.length for row in both)) as advance:
            strategies = selecting(matcher(patterns)) if patterns else default_strategies
            options = replace(sides[0].tree.checkpoint.options, progress=advance)
            left, right = (side.tree.checkpoint.storage for side in sides)
            difference = compare(left, right, strategies=strategies, options=options)
    return ComparedPair(sides[0], sides[1], difference, only_structure, bool(patterns))


def structure_difference(left: StoredContents, right: StoredContents) -> CheckpointDifference:
    """Return the differences of two checkpoints in keys, dtypes and global shapes.

    Examples:
        >>> one = StoredContents((TensorRow("w", "float32", (4,), 16, None),), ())
        >>> structure_difference(one, StoredContents((), ())).only_left
        ('w',)
    """
    mine, theirs = ({row.key: row for row in contents.tensors} for contents in (left, right))
    # Objects are compared separately, since an object's unique key may equal a tensor's key.
    objects = [dict.fromkeys(row.unique_key for row in contents.objects) for contents in (left, right)]
    both = [(mine[key], theirs[key]) for key in mine if key in theirs]
    kinds = [
        KindDifference(row.key, _kind_of(row), _kind_of(other))
        for row, other in both
        if (row.dtype, row.shape) != (other.dtype, other.shape)
    ]
    return CheckpointDifference(
        only_left=(*_missing(mine, theirs), *_missing(*objects)),
        only_right=(*_missing(theirs, mine), *_missing(*reversed(objects))),
        kinds=tuple(kinds),
    )


def _missing(names: Mapping[str, Any], others: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(name for name in names if name not in others)


def selecting(matches: Callable[[str], bool]) -> Strategies:
    """Return a dispatch table that hides the common state, and all tensors and objects whose keys don't match.

    With this table, `compare` neither reads nor compares hidden values, since they aren't in the metadata.
    """

    def load_metadata(load: Callable[..., Any], checkpoint: Any) -> Mapping[str, Any]:
        metadata = load(checkpoint)
        shards = ((key, metadata[key]) for key in metadata)
        return {key: shard for key, shard in shards if matches(key) or matches(shard.key)}

    table = dict(default_strategies)
    for row, strategy in default_strategies.items():
        if row[0] is StrategyAction.LOAD_COMMON:
            table[row] = lambda checkpoint: {}
        elif row[0] is StrategyAction.LOAD_METADATA:
            table[row] = partial(load_metadata, strategy)
    return table


def _kind_of(row: TensorRow) -> TensorKind:
    return TensorKind(dtype_from_name(row.dtype), row.shape, 0)
