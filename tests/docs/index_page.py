"""The package index's page: what the index makes of a description, and where its links lead.

``python -m tests.docs.index_page WHEEL`` looks at a built wheel's, which `.ci/package` makes.
"""

from __future__ import annotations

import sys
import zipfile
from email import message_from_string
from html.parser import HTMLParser

from markdown_it import MarkdownIt


class _Targets(HTMLParser):
    """The addresses that a page's links and pictures name.

    Attributes:
        found: addresses in the order of the page; "" for a picture or link without one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        name = {"a": "href", "img": "src"}.get(tag)
        if name is not None:
            self.found.append(dict(attrs).get(name) or "")


def dead_targets(description: str) -> list[str]:
    """Return the addresses of links and pictures that lead nowhere from the index's page: all that aren't absolute.

    Examples:
        >>> dead_targets("[a](docs/a.md), [b](https://example.org) ![c](c.svg)")
        ['docs/a.md', 'c.svg']
    """
    # The index renders CommonMark with tables, too, by cmark-gfm. This renderer comes with rich.
    targets = _Targets()
    targets.feed(MarkdownIt("commonmark").enable("table").render(description))
    return [target for target in targets.found if not target.startswith(("http://", "https://"))]


def description_of(wheel: str) -> str:
    """Return the description that a wheel carries."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        text = message_from_string(archive.read(name).decode()).get_payload()
    assert isinstance(text, str)
    return text


if __name__ == "__main__":
    if dead := dead_targets(description_of(sys.argv[1])):
        sys.exit(f"{sys.argv[1]}: links and pictures that lead nowhere from the index's page: {', '.join(dead)}")
