"""The picture of a layout says of each element who holds it: read back from its SVG and its text."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import NamedTuple
from xml.etree import ElementTree

import numpy as np
import torch
from hypothesis import given

from shardtree.core.layouts import tree_columns
from shardtree.layouts import ShardColumns
from shardtree.mapping import ShardedTensor, is_main_replica
from shardtree.pictures import Picture, Plane, cell_lines, layout_picture, svg_of
from shardtree.testing import Layout
from tests.core.trees.samples import assert_caught
from tests.meshes.test_coverage_of_trees import FATES, LAYOUTS, trees

SVG = "{http://www.w3.org/2000/svg}"
TITLE = re.compile(r"\[(?P<box>[\d:, ]*)\](?P<words>[^\d]*)(?P<ranks>[\d, -]*)")


class Drawn(NamedTuple):
    """A cell as an SVG has it."""

    place: tuple[float, float, float, float]  # left, top, right, bottom
    tone: str
    box: tuple[slice, ...]
    ranks: frozenset[int]


def cells_of(svg: str) -> list[list[Drawn]]:
    """Return the cells of each plane of an SVG."""
    panels = ElementTree.fromstring(svg).findall(f"./{SVG}g/{SVG}g")
    drawn = [
        [cell(rect) for rect in panel.findall(f"./{SVG}rect") if rect.find(f"{SVG}title") is not None]
        for panel in panels
    ]
    return [plane for plane in drawn if plane]


def cell(rect: ElementTree.Element) -> Drawn:
    x, y, width, height = (float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
    said = TITLE.match(rect.findtext(f"{SVG}title", ""))
    assert said is not None
    box = tuple(slice(*map(int, span.split(":"))) for span in said["box"].split(", "))
    return Drawn((x, y, x + width, y + height), rect.attrib["class"], box, numbers(said["ranks"]))


def numbers(text: str) -> frozenset[int]:
    spans = [part.split("-") for part in text.replace(" ", "").split(",") if part]
    return frozenset(rank for low, *high in spans for rank in range(int(low), int(high[0] if high else low) + 1))


def truth(ranks: list[list[ShardedTensor]], shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return how many main replicas hold each element, and which ranks do, as bits."""
    mains, holders = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
    for rank, shard in ((rank, shard) for rank, own in enumerate(ranks) for shard in own):
        number = torch.arange(mains.numel()).view(mains.shape)[shard.global_slice()].reshape(-1)
        number = number[shard.flattened_range or slice(None)]
        mains.view(-1)[number] += is_main_replica(shard.replica_id)
        holders.view(-1)[number] |= 1 << rank
    return mains.numpy().reshape(shape or (1,)), holders.numpy().reshape(shape or (1,))


def check_drawn(draw: Callable[[ShardColumns], Picture], layout: Layout, fates: list[str]) -> None:
    ranks = trees(layout, fates)
    columns = tree_columns(ranks)
    if not columns.keys or not all(layout.global_shape):
        return
    picture = draw(columns)
    mains, holders = truth(ranks, layout.global_shape)
    seen = np.zeros_like(mains)
    for plane in cells_of(svg_of(picture)):
        check_places(plane)
        for one in plane:
            seen[one.box] += 1
            assert (holders[one.box] == sum(1 << rank for rank in one.ranks)).all()
            assert ((mains[one.box] == 0) == (one.tone == "hole")).all()
            assert ((mains[one.box] > 1) == (one.tone == "overlap")).all()
    is_whole = len(picture.notes) == 0 or "slices" not in picture.notes[-1]
    assert (seen == 1).all() if is_whole else (seen <= 1).all()


def check_places(plane: list[Drawn]) -> None:
    """Check that cells lie as their boxes do: before or behind each other along an axis, and so never on each other."""
    for one, other in combinations(plane, 2):
        apart = [
            (first, second)
            for first, second in ((one, other), (other, one))
            for mine, theirs in zip(first.box, second.box, strict=True)
            if mine.stop <= theirs.start
        ]
        assert apart
        assert any(a.place[2] <= b.place[0] + 0.06 or a.place[3] <= b.place[1] + 0.06 for a, b in apart)


@given(LAYOUTS, FATES)
def test_an_svg_says_of_each_element_who_holds_it(layout: Layout, fates: list[str]) -> None:
    check_drawn(layout_picture, layout, fates)


def test_the_law_catches_a_cell_of_another_rank() -> None:
    def swapped(columns: ShardColumns) -> Picture:
        return layout_picture(replace(columns, rank=columns.rank.max() - columns.rank))

    assert_caught(check_drawn, swapped, LAYOUTS, FATES)


def each_plane(change: Callable[[Plane], Plane]) -> Callable[[ShardColumns], Picture]:
    def drawn(columns: ShardColumns) -> Picture:
        picture = layout_picture(columns)
        return replace(picture, rows=tuple(tuple(map(change, row)) for row in picture.rows))

    return drawn


def turned(plane: Plane) -> Plane:
    cells = [replace(one, left=1 - one.right, right=1 - one.left) for one in plane.cells]
    flipped = [replace(one, top=1 - one.bottom, bottom=1 - one.top) for one in cells]
    return replace(plane, cells=tuple(flipped))


def check_text(draw: Callable[[ShardColumns], Picture], layout: Layout, fates: list[str]) -> None:
    """Check the characters that elements are drawn with: that of a rank that holds them, or of a fault."""
    ranks = trees(layout, fates)
    columns = tree_columns(ranks)
    if not columns.keys or not all(layout.global_shape) or len(layout.global_shape) > 2:
        return
    mains, holders = (each.reshape(-1, each.shape[-1]) for each in truth(ranks, layout.global_shape))
    (plane,) = draw(columns).rows[0]
    bare = replace(plane, cells=tuple(replace(one, labels=()) for one in plane.cells))
    rows, width = mains.shape
    lines = ["".join(span.text for span in line) for line in cell_lines(bare, width, rows, filled=True)]
    for (row, column), count in np.ndenumerate(mains):
        mark = lines[row][column]
        expected = {0: "!", 1: None}.get(int(count), "X")
        assert mark == expected if expected else mark.isdecimal() and holders[row, column] >> int(mark) & 1


@given(LAYOUTS, FATES)
def test_a_text_has_each_element_at_its_place(layout: Layout, fates: list[str]) -> None:
    check_text(layout_picture, layout, fates)


def test_the_law_of_texts_catches_a_mirrored_plane() -> None:
    assert_caught(check_text, each_plane(turned), LAYOUTS, FATES)
