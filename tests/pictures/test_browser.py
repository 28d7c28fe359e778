"""In a real browser, no text of a picture or a report is cut off or lies on another, or leaves its cell or page."""

from __future__ import annotations

import html
import json
from pathlib import Path

import pytest

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
const wrong = [], width = document.documentElement.clientWidth;
for (const box of document.querySelectorAll('.wide, figure, h1, h2, p'))
  if (box.scrollWidth > box.clientWidth || box.getBoundingClientRect().right > width) wrong.push(box.textContent);
document.body.textContent = JSON.stringify({wide: wrong, blocks: document.querySelectorAll('table, figure').length});
"""


def test_a_report_fits_its_page(tmp_path: Path) -> None:
    save_training_state(tmp_path / "a")
    assert run("convert", tmp_path / "a", tmp_path / "b", "--to", "zarr").exit_code == 0
    assert run("report", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "report.html").exit_code == 0
    page = (tmp_path / "report.html").read_text()
    # Reports allow no script: the policy goes for the one that measures.
    page = page.replace("default-src 'none'", "").replace("</body>", f"<script>{PAGE_SCRIPT}</script></body>")
    found = json.loads(html.unescape(text_after_scripts(page, tmp_path)))
    assert found["wide"] == [] and found["blocks"] > 10
