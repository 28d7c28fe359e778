"""In a real browser, no text of a picture or a report is cut off or lies on another, or leaves its cell or page."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.pictures import svg_of
from tests.cli.checkpoints import run, save_training_state
from tests.pictures.chromium import BROWSER, MISSING, text_after_scripts
from tests.pictures.kinds import KINDS, picture

pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason=MISSING)]

SCRIPT = """
const found = {};
const inside = (a, b, by) =>
  a.left >= b.left - by && a.right <= b.right + by && a.top >= b.top - by && a.bottom <= b.bottom + by;
// A line is higher than its letters: what is within three pixels of its edges is empty.
const beside = (a, b) => a.left >= b.right - 0.5 || b.left >= a.right - 0.5;
const meet = (a, b) => !beside(a, b) && a.top + 3 < b.bottom - 3 && b.top + 3 < a.bottom - 3;
for (const figure of document.querySelectorAll('figure')) {
  const svg = figure.querySelector('svg'), whole = svg.getBoundingClientRect(), wrong = [];
  const texts = [...svg.querySelectorAll('text')].map(text => [text, text.getBoundingClientRect()]);
  texts.forEach(([text, box], place) => {
    const said = text.lastChild.textContent;
    if (!inside(box, whole, 0)) wrong.push('cut: ' + said);
    for (const [other, it] of texts.slice(0, place))
      if (meet(box, it)) wrong.push('on another: ' + said + ' / ' + other.lastChild.textContent);
    const cell = text.previousElementSibling;
    const label = text.classList.contains('mid') && !text.classList.contains('dim');
    if (label && cell && cell.tagName === 'rect' && !inside(box, cell.getBoundingClientRect(), 3))
      wrong.push('out of its cell: ' + said);
  });
  if (wrong.length) found[figure.id] = wrong;
}
document.body.textContent = JSON.stringify(found);
"""

BROKEN = """<svg viewBox="0 0 100 60" width="100" height="60"><text x="2" y="20">one</text>
<text x="6" y="22">two</text><text x="90" y="40">three</text><rect width="9" height="9" y="44"/>
<text class="mid" x="0" y="52">four</text></svg>"""


def test_no_text_is_cut_or_lies_on_another(tmp_path: Path) -> None:
    svgs = {kind: svg_of(picture(kind)) for kind in KINDS} | {"broken": BROKEN}
    figures = "".join(f'<figure id="{kind}">{svg}</figure>' for kind, svg in svgs.items())
    page = f'<!doctype html><meta charset="utf-8"><body>{figures}<script>{SCRIPT}</script></body>'
    found = json.loads(html.unescape(text_after_scripts(page, tmp_path)))
    wrong = [text.partition(":")[0] for text in found.pop("broken")]
    assert wrong == ["on another", "cut", "out of its cell"]
    assert found == {}


PAGE_SCRIPT = """
const frame = document.querySelector('iframe'), page = frame.contentDocument, width = page.documentElement.clientWidth;
const wrong = [], broken = [], range = page.createRange();
for (const box of page.querySelectorAll('main *:not(svg *)'))
  if (box.scrollWidth > box.clientWidth + 1 && getComputedStyle(box).display !== 'inline'
      || box.getBoundingClientRect().right > width) wrong.push(box.textContent);
for (const cell of page.querySelectorAll('td, th, h1, h2, p'))
  for (const node of cell.childNodes)
    for (const word of node.nodeType === 3 ? node.textContent.matchAll(/[A-Za-z0-9]+/g) : []) {
      range.setStart(node, word.index); range.setEnd(node, word.index + word[0].length);
      if (new Set([...range.getClientRects()].map(box => Math.round(box.top))).size > 1) broken.push(word[0]);
    }
const scrolls = page.documentElement.scrollWidth > width, blocks = page.querySelectorAll('tr').length;
document.body.textContent = JSON.stringify({width, wrong, broken, scrolls, blocks});
"""

OLD_STYLE = ".wide tr{display:table-row}.wide td,.wide td.n{display:table-cell;padding:5px 14px 5px 0}"


def seen_at(width: int, page: str, folder: Path) -> Any:
    # A window of 360 pixels is less than a browser without a window makes; a frame's width is what its rules see.
    frame = f'<iframe style="width:{width}px;height:600px;border:0" srcdoc="{html.escape(page)}"></iframe>'
    script = f"<script>window.onload = () => {{{PAGE_SCRIPT}}}</script>"
    return json.loads(html.unescape(text_after_scripts(f"<!doctype html><body>{frame}{script}</body>", folder)))


def test_a_report_fits_a_phone_and_a_screen_and_breaks_no_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing scrolls sideways at 360 pixels; a page whose tables stay tables there is caught."""
    monkeypatch.chdir(tmp_path)  # a folder's long name might be broken
    save_training_state("a")
    long = "optimizer.state.exp_avg.decoder.layers.0.self_attention.linear_qkv.weight"
    st.save({"w": st.ShardedTensor.from_rank_offsets(long, torch.ones(4, 4)), "arguments": {"k" * 20: 1}}, "b")
    assert run("report", "a", "b", "-o", "report.html").exit_code == 1
    page = Path("report.html").read_text()
    for width in (1000, 360):
        found = seen_at(width, page, tmp_path)
        assert found["width"] == width and found["blocks"] > 20
        assert (found["wrong"], found["scrolls"]) == ([], False)
    assert found["broken"] == []
    old = seen_at(360, page.replace("</style>", f"{OLD_STYLE}</style>"), tmp_path)
    assert old["broken"] or old["wrong"]
