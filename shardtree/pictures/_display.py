"""draw: the picture of a value, to print in a terminal, show in a notebook, or save to a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import Any

from ..core.layouts import ShardColumns, StoredLayout, shard_columns, tensor_shards, tree_columns
from ..core.lazy import LazyTensor
from ..core.mapping import ShardedTensor, ShardedTensorFactory
from ..errors import MetadataError, StrategyError, TreeError, error_text, shorten
from ..inspection import OpenCheckpoint, StoredBoxes, index_of, largest_tensors
from ..live.resharding import ReshardPlan, Schedule
from ..meshes import Mesh
from ..series import CheckpointSeries
from ..series.policies import SavedStep
from ..shell.storage import storage_at
from ..traces import Trace
from ._flows import factory_picture, lens_picture, trace_picture
from ._html import page_of, text_html
from ._layouts import layout_picture, mesh_picture, shard_picture, stored_picture, tree_picture
from ._picture import Picture
from ._plans import plan_picture, schedule_picture
from ._series import series_picture
from ._svg import svg_of
from ._text import text_of

__all__ = ["Drawing", "draw"]

_SHOWN = 6  # of an open checkpoint's tensors


@dataclass(frozen=True, slots=True, repr=False)
class Drawing:
    """A picture that prints as text in the terminal's width and appears as SVG in notebooks.

    Attributes:
        picture: The picture itself, an immutable value.
    """

    picture: Picture

    def __repr__(self) -> str:
        return text_of(self.picture, _terminal_width())

    def svg(self) -> str:
        """Return the picture as a self-contained SVG document."""
        return svg_of(self.picture)

    def _repr_svg_(self) -> str:
        return self.svg()

    def _repr_html_(self) -> str:
        # Inline, since an image shows no text on hover.
        return self.svg()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the picture to a file as SVG, HTML or plain text, chosen by the suffix of the path.

        Args:
            path: A path or URL that ends in .svg, .html or .txt; an existing file is replaced.

        Raises:
            MetadataError: The path has another suffix.
            StorageError: The file can't be written.
        """
        name = os.fspath(path).rpartition("/")[2]
        forms: Mapping[str, Callable[[Picture], str]] = {"svg": svg_of, "html": page_of, "txt": text_of}
        form = forms.get(name.rpartition(".")[2].lower())
        if form is None:
            expected = ", ".join(f".{ending}" for ending in forms)
            raise MetadataError(error_text("save a drawing: unknown suffix", found=repr(name)[:200], expected=expected))
        write_text(path, form(self.picture))


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text, such as a page, to a path or URL; an existing file is replaced.

    Raises:
        StorageError: The file can't be written.
    """
    folder, slash, name = os.fspath(path).rpartition("/")
    # Text that isn't UTF-8, such as a lone surrogate of a key, was escaped when the page was made.
    storage_at(folder or slash or ".").replace(name, text.encode(), durable=False)


def _terminal_width() -> int:
    try:
        return max(os.get_terminal_size().columns, 20)
    except OSError:
        return 80  # not a terminal


def draw(value: Any, of: Any = None, *, shape: Sequence[int] | None = None) -> Drawing:
    """Return the picture of a layout, mesh, lens, trace, plan, series or open checkpoint.

    The picture prints as text, notebooks show it, and ``.save("x.svg")`` writes it.

    - Ranks' trees, or columns such as `layout_of` returns: which rank holds which part, with holes and overlaps in red.
      `of` is a tensor's key.
    - A mesh: its ranks. With a spec as `of`: also which rank holds which part of a tensor with the shape `shape`.
    - A shard, or one rank's tree: the position of shards in their global tensors.
    - An open checkpoint, or one of its tensors: which file holds which part. `of` is a tensor's key.
    - A lens: where each row of the local tensors is stored. `of` is a shard, or a list with one shard per rank.
    - A factory: where each row of its tensor is stored.
    - A trace: the source rows of each output row. `of` is the name of an output.
    - A reshard plan: the traffic between ranks, and one tensor's layouts before and after. `of` is the tensor's key.
    - The schedule of a reshard plan: the bytes that move in each step.
    - A series, or a list of its steps, over time. With a retention policy as `of`: also which steps it keeps.

    Only metadata is read: the index of an open checkpoint, the listing of a series. If a series has a world of
    several ranks, all of them must call this function.

    Args:
        value: The value to draw.
        of: Second value for the picture, or the name of the part to draw, as listed above.
        shape: Shape of the tensor that a spec cuts; by default, the smallest one that is cut into all parts.

    Raises:
        TreeError: There is no picture of a value of this type.
        KeyMismatch: The value has no tensor or output of this name.

    Examples:
        >>> import torch, shardtree as st
        >>> trees = st.shard({"w": torch.empty(4)}, st.Mesh(tp=2), st.P("tp"))
        >>> st.draw(trees)
        'w' (4,) float32
        axis 0: 4
        000000000000000000000000111111111111111111111111
        00000000 rank 0 0000000011111111 rank 1 11111111
        000000000000000000000000111111111111111111111111
        2 pieces
        >>> st.draw(trees).svg()[:4]
        '<svg'
    """
    return Drawing(mesh_picture(value, of, shape) if isinstance(value, Mesh) else picture_of(value, of))


_MOST_LINES = 40
_DRAWN = (Mesh, ShardedTensor, ShardColumns, StoredLayout, ReshardPlan, Schedule, OpenCheckpoint, CheckpointSeries)


def html_of(value: Any) -> str:
    """Return a value's HTML for notebooks: its picture or, if it has none, the first lines of its text.

    Examples:
        >>> html_of("1 < 2")
        '<pre>1 &lt; 2</pre>'
    """
    # Factories aren't drawn in a repr, since that would run the caller's function on a whole tensor.
    if isinstance(value, _DRAWN):
        # Other values are shown as text, such as a checkpoint whose format doesn't record the files of its chunks.
        with suppress(StrategyError):
            return draw(value)._repr_html_()
    lines = shorten(str(value).split("\n"), shown=_MOST_LINES)
    return f"<pre>{'<br>'.join(map(text_html, lines))}</pre>"


@singledispatch
def picture_of(value: Any, of: Any) -> Picture:
    """Return the picture of a value, as `draw` shows it.

    Args:
        value: The value to draw.
        of: Second argument of `draw`, such as the key of the tensor to draw; None if there is none.

    Raises:
        TreeError: There is no picture for the type of `value`.

    Examples:
        >>> picture_of((SavedStep(100), SavedStep(200)), None).title
        '2 steps, 100 to 200'
    """
    if callable(value):
        shards = [of] if isinstance(of, ShardedTensor) else list(of or ())
        return lens_picture(value, shards)
    fix = "Pass one of the values that help(st.draw) lists."
    raise TreeError(error_text("draw: a value of this type cannot be drawn", found=type(value).__name__, fix=fix))


picture_of.register(Picture, lambda value, of: value)
picture_of.register(ShardColumns, layout_picture)
picture_of.register(StoredLayout, lambda value, of: stored_picture(value))
picture_of.register(Trace, trace_picture)
picture_of.register(ReshardPlan, plan_picture)
picture_of.register(Schedule, lambda value, of: schedule_picture(value))
picture_of.register(ShardedTensorFactory, lambda value, of: factory_picture(value))
picture_of.register(CheckpointSeries, lambda value, of: series_picture(value.steps(), of))


@picture_of.register
def _(value: ShardedTensor, of: Any) -> Picture:
    # A stored tensor's source names its checkpoint; a tensor that was changed since is drawn as a shard.
    reader = getattr(value.data.source, "reader", None) if isinstance(value.data, LazyTensor) else None
    opened = reader.tree if isinstance(reader, StoredBoxes) else None
    if opened is not None and opened.metadata.get(value.key) == value.without_data():
        return stored_picture(opened.stored_layout(value.key))
    return shard_picture(value)


@picture_of.register
def _(value: OpenCheckpoint, of: Any) -> Picture:
    if of is not None:
        return stored_picture(value.stored_layout(of))
    metadata = index_of(value.checkpoint, value.strategies)
    if metadata is None or not metadata.index.key_axes.size:
        return stored_picture(value.stored_layout())
    count = int(metadata.index.key_axes.size)
    picture = stored_picture(value.stored_layout(*largest_tensors(metadata.index, _SHOWN)))
    return replace(picture, notes=(f"The {_SHOWN} largest of {count:,} tensors.",)) if count > _SHOWN else picture


@picture_of.register(list)
@picture_of.register(tuple)
def _(value: Sequence[Any], of: Any) -> Picture:
    if value and all(isinstance(each, SavedStep) for each in value):
        return series_picture(value, of)
    return layout_picture(tree_columns(list(value)), of)


@picture_of.register(Mapping)
def _(value: Mapping[Any, Any], of: Any) -> Picture:
    # Ranks are numbers; one rank's tree has names.
    if value and all(isinstance(name, int) for name in value):
        return layout_picture(tree_columns(value), of)
    shards = [each for each in tensor_shards(dict(value)) if of is None or each.key == of]
    return tree_picture(shard_columns(shards))
