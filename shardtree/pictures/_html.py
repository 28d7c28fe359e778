"""Pages of HTML: one static file each, without script and without anything from elsewhere; all text is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import partial
from html import escape

from ..errors import printable
from ._picture import Picture
from ._style import FONT
from ._svg import svg_of

_LIGHT = "--back:#ffffff;--ink:#161b22;--dim:#59636e;--rule:#dfe4ea;--row:#f6f8fa;--bad:#b3141a;--good:#1a6e34"
_DARK = "--back:#11161d;--ink:#eef2f6;--dim:#a3adb8;--rule:#2a323c;--row:#171d25;--bad:#ff7b72;--good:#56d17e"
_STYLE = "".join(
    [
        f":root{{color-scheme:light dark;{_LIGHT}}}@media(prefers-color-scheme:dark){{:root{{{_DARK}}}}}",
        f"body{{margin:0;background:var(--back);color:var(--ink);font:15px/1.5 {FONT}}}",
        "main{max-width:1040px;margin:0 auto;padding:32px 24px 64px}",
        "h1{font-size:24px;margin:0 0 4px;overflow-wrap:anywhere}h2{font-size:17px;margin:36px 0 8px}",
        "p{margin:6px 0;overflow-wrap:anywhere}.dim{color:var(--dim)}.bad{color:var(--bad);font-weight:600}",
        ".good{color:var(--good);font-weight:600}.wide{overflow-x:auto;margin-bottom:16px}",
        "table{border-collapse:collapse;width:100%;font-size:14px}th{text-align:left;color:var(--dim)}",
        "th,td{padding:5px 14px 5px 0;border-bottom:1px solid var(--rule);vertical-align:top}",
        "td{overflow-wrap:anywhere}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}",
        "td:first-child{white-space:pre-wrap}summary{cursor:pointer;color:var(--dim);margin:8px 0}",
        "tbody tr:hover{background:var(--row)}figure{margin:12px 0}figure svg{max-width:100%;height:auto}",
        # On a phone, a row is a block, and each cell a line that begins with its column's heading.
        "@media(max-width:700px){main{padding:16px 12px 32px}",
        "tr{display:block;padding:5px 0;border-bottom:1px solid var(--rule)}",
        "td,td.n,th{display:block;border:0;padding:0;text-align:left;white-space:pre-wrap}",
        "th+th,th:empty,td.n:empty,td:empty{display:none}",
        "td[data-of]::before{content:attr(data-of) ' ';color:var(--dim)}}",
    ]
)

# The page makes no request, whatever text a key in it has.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page_of(picture: Picture) -> str:
    """Return a page with one picture.

    Examples:
        >>> page_of(Picture("nothing", ()))[:15]
        '<!doctype html>'
    """
    return html_page(picture.title, [figure_html(picture)])


def html_page(title: str, parts: Iterable[str]) -> str:
    """Return a page.

    Args:
        title: Title of the page, as text.
        parts: Parts of the page as HTML, such as `table_html` returns.

    Examples:
        >>> "&lt;script&gt;" in html_page("<script>", [])
        True
    """
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"><title>{text_html(title)}</title>'
        f"<style>{_STYLE}</style></head>"
    )
    return f"{head}<body><main>{''.join(parts)}</main></body></html>\n"


def text_html(text: str) -> str:
    """Return text as HTML, with invisible characters escaped as in Python.

    Examples:
        >>> text_html("a<b")
        'a&lt;b'
    """
    return escape(printable(text))


def element_html(name: str, text: str, style: str = "") -> str:
    """Return an element that holds text.

    Examples:
        >>> element_html("p", "1 < 2", "dim")
        '<p class="dim">1 &lt; 2</p>'
    """
    attribute = f' class="{style}"' if style else ""
    return f"<{name}{attribute}>{text_html(text)}</{name}>"


def details_html(summary: str, inner: str) -> str:
    """Return HTML that is folded until its summary is clicked, without a script.

    Examples:
        >>> details_html("more", "<p>it</p>")
        '<details><summary>more</summary><p>it</p></details>'
    """
    return f"<details>{element_html('summary', summary)}{inner}</details>"


def figure_html(picture: Picture) -> str:
    """Return a picture as a part of a page.

    Examples:
        >>> figure_html(Picture("nothing", ()))[:12]
        '<figure><svg'
    """
    return f"<figure>{svg_of(picture)}</figure>"


def table_html(headings: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int] = ()) -> str:
    """Return an HTML table of texts.

    Args:
        headings: Headings of the columns; the header row is left out if all are empty.
        rows: Rows of texts, one text for each column.
        numbers: Indices of the columns that hold numbers, which are right-aligned.

    Examples:
        >>> table_html(["key"], [["a"]])
        '<div class="wide"><table><thead><tr><th>key</th></tr></thead><tbody><tr><td>a</td></tr></tbody></table></div>'
    """
    styles = [' class="n"' if place in numbers else "" for place in range(len(headings))]
    cells = "".join(f"<th{style}>{text_html(text)}</th>" for style, text in zip(styles, headings, strict=True))
    head = f"<thead><tr>{cells}</tr></thead>" if any(headings) else ""
    # Without a header row, as on a phone, cells show their headings; the first cell names the row, and needs none.
    marks = [f' data-of="{text_html(text)}"' if place and text else "" for place, text in enumerate(headings)]
    starts = [f"<td{style}{mark}>" for style, mark in zip(styles, marks, strict=True)]
    # Lines may end after the parts of a key or a path, so that no word is broken.
    breaks = partial(re.compile(r"(?<=\w)([._/])(?=[^\W\d])").sub, r"\1<wbr>")
    lines = (
        "".join(f"{start}{breaks(text_html(text))}</td>" for start, text in zip(starts, row, strict=True))
        for row in rows
    )
    body = "".join(f"<tr>{row}</tr>" for row in lines)
    return f'<div class="wide"><table>{head}<tbody>{body}</tbody></table></div>'
