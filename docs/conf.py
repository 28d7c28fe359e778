"""How the site is built: `sphinx-build docs docs/_build`."""

from __future__ import annotations

from importlib.metadata import version as installed_version

project = "shardtree"
author = "the shardtree authors"
copyright = f"2025, {author}"
version = release = installed_version("shardtree")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

default_role = "code"  # docstrings write names in single backticks
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_class_signature = "separated"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

html_theme = "furo"
html_title = "shardtree"
html_copy_source = False
html_show_sphinx = False
