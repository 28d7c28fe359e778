"""Pictures of all kinds as SVG and text: documents that parse, small, with every text as text."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from shardtree.pictures import Bars, Cell, Flow, Plane, svg_of, text_of
from tests.pictures.kinds import HOSTILE, KINDS, LONG, picture

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_svg_is_xml_and_small(kind: str) -> None:
    svg = svg_of(picture(kind))
    root = ElementTree.fromstring(svg.encode())
    assert root.tag == f"{SVG}svg" and len(svg) < 100_000
    assert {node.tag.removeprefix(SVG) for node in root.iter()} <= {
        *("svg", "title", "style", "defs", "pattern", "rect", "path", "circle", "g", "text"),
    }
    assert "http" not in svg.replace('xmlns="http://www.w3.org/2000/svg"', "") and "url(" not in svg.replace(
        "url(#st-", ""
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_keeps_to_its_width(kind: str) -> None:
    for width in (20, 57, 200):
        lines = text_of(picture(kind), width).split("\n")
        assert max(map(len, lines)) <= width
        assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize("kind", KINDS)
def test_cells_of_a_plane_lie_side_by_side(kind: str) -> None:
    for plane in (panel for row in picture(kind).rows for panel in row if isinstance(panel, Plane)):
        assert all(0 <= one.left < one.right <= 1 and 0 <= one.top < one.bottom <= 1 for one in plane.cells)
        assert not any(meet(one, other) for at, one in enumerate(plane.cells) for other in plane.cells[:at])


def meet(one: Cell, other: Cell) -> bool:
    beside = max(one.left, other.left) < min(one.right, other.right)
    return beside and max(one.top, other.top) < min(one.bottom, other.bottom)


def test_a_long_key_is_shortened_and_whole_on_hover() -> None:
    root = ElementTree.fromstring(svg_of(picture("two axes")))
    shown = [node for node in root.iter(f"{SVG}text") if node.get("class") == "title"]
    assert LONG in (shown[0].findtext(f"{SVG}title") or "")
    assert "..." in (shown[0].find(f"{SVG}title").tail or "") and len(shown[0].find(f"{SVG}title").tail) < 80


def test_a_hostile_key_is_text() -> None:
    svg = svg_of(picture("hostile key"))
    assert "<script" not in svg and "alert(1)" in svg
    assert HOSTILE[:20] in ElementTree.fromstring(svg).findtext(f"{SVG}title", "")


def test_ten_thousand_ranks_share_cells() -> None:
    (plane,) = picture("10,000 rows").rows[0]
    assert isinstance(plane, Plane) and len(plane.cells) == 25
    assert [cell.title for cell in plane.cells][:2] == ["[0:800, 0:64] ranks 0-399", "[800:1600, 0:64] ranks 400-799"]
    assert picture("10,000 rows").notes == (
        "Pieces too small to be told apart share a cell, which names all that hold them.",
    )


def test_a_thin_hole_is_seen() -> None:
    (plane,) = picture("a thin hole").rows[0]
    assert isinstance(plane, Plane)
    (hole,) = (cell for cell in plane.cells if cell.tone == "hole")
    assert hole.title == "[1:2, 0:3] held by no main replica" and hole.bottom - hole.top > 0.01


def test_a_plan_is_drawn_with_its_bound() -> None:
    links, totals = picture("plan").rows[1]
    assert isinstance(links, Plane) and isinstance(totals, Bars)
    assert [bar.name for bar in totals.bars] == ["move", "must move", "stay"]
    assert totals.bars[0].amount == totals.bars[1].amount
    assert len(links.cells) == 16 and {cell.tone for cell in links.cells} == {"kept", "h8"}


def test_a_lens_shows_where_rows_go() -> None:
    (flow,) = picture("gate and up").rows[0]
    assert isinstance(flow, Flow)
    ends = [(one.block, one.start, one.rows, one.to_start) for one in flow.streams]
    assert ends == [(0, 0, 4, 0), (0, 4, 4, 8), (1, 0, 4, 4), (1, 4, 4, 12)]
    (padding,) = picture("padding").rows[0]
    assert isinstance(padding, Flow) and padding.streams[-1].title.endswith("is not stored")
