"""How the site is built: `sphinx-build docs docs/_build`."""

from __future__ import annotations

import sys
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

project = "shardtree"
author = "the shardtree authors"
copyright = f"2025, {author}"
version = release = installed_version("shardtree")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_design",
]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
templates_path = ["_templates"]
exclude_patterns = ["_build", "_templates"]

default_role = "code"  # docstrings write names in single backticks
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_class_signature = "separated"
autodoc_default_options = {"exclude-members": "__new__, __init__"}  # a class's docstring says what it is built from
autosummary_imported_members = True  # a room's `__all__` says what it holds
autosummary_ignore_module_all = False
python_maximum_signature_line_length = 80
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

html_theme = "furo"
html_title = "shardtree"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False


# Pages that have gone, and where what they said is now.
MOVED = {
    "reference": "api",
    "object-stores": "reliability",
    "faq": "installing",
    "better-ways": "design",
    "fingerprints": "checks",
    "verify": "checks",
    "explain": "checks",
    "training": "fsdp2",
    "pipelines": "surgery",
    "optimizer-formats": "optimizer-states",
    "zero": "optimizer-states",
    "pictures": "layouts",
    "async-save": "series",
    "glossary": "installing",
    "coming-from": "installing",
    "dependencies": "installing",
    "dtensor": "fsdp2",
    "bad-input": "ten-minutes",
    "laws": "testing",
    "mutation": "testing",
    "torch-dist": "formats",
    "dcp": "formats",
    "zarr": "formats",
    "from-megatron": "megatron",
    "megatron-users": "megatron",
}


def lead_on(app: Any, error: Exception | None) -> None:
    """Write a page at each old address that leads on to the new one."""
    for old, new in MOVED.items() if error is None and app.builder.format == "html" else ():
        Path(app.outdir, f"{old}.html").write_text(f'<meta http-equiv="refresh" content="0; url={new}.html">\n')


def setup(app: Any) -> None:
    """Make the pictures of the pages anew, by the blocks of docs/layouts.md, so that none is stale."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.docs import pictures

    pictures.write()
    app.connect("build-finished", lead_on)
    # The fields of a named tuple: its docstring's attributes have them already.
    app.connect("autodoc-skip-member", lambda *event: True if type(event[3]).__name__ == "_tuplegetter" else None)
