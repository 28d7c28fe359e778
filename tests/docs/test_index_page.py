"""The description on the package index: the README, whose relative links and pictures would lead nowhere there."""

from __future__ import annotations

import re
import tomllib
import zipfile
from pathlib import Path

from tests.docs.index_page import dead_targets, description_of

ROOT = Path(__file__).parents[2]
HOOK = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
README = (ROOT / "README.md").read_text()


def description() -> str:
    """Return what hatch-fancy-pypi-readme makes by the settings in pyproject.toml."""
    page, last = HOOK["fragments"]
    text = (ROOT / page["path"]).read_text().partition(page["end-before"])[0] + last["text"]
    for each in HOOK["substitutions"]:
        text = re.sub(each["pattern"], each["replacement"], text)
    return text


def test_no_link_or_picture_leads_nowhere() -> None:
    assert dead_targets(description()) == []
    assert len(dead_targets(README)) > 20  # the test would find them


def test_the_description_is_the_readme_but_for_links_and_pictures() -> None:
    lines = {re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line) for line in README.splitlines()}
    others = [line for line in description().splitlines() if line not in lines]
    assert others == [HOOK["fragments"][1]["text"].strip()]
    code = [re.findall(r"```.*?```", text, re.DOTALL) for text in (description(), README)]
    assert code[0] == code[1]


def test_a_wheels_description_is_read(tmp_path: Path) -> None:
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("a-1.dist-info/METADATA", "Metadata-Version: 2.4\nName: a\n\n# Résumé [b](c.md)\n")
    assert description_of(str(wheel)) == "# Résumé [b](c.md)\n"
