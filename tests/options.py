"""Options as keywords, for tests that vary them one by one: ``save(tree, folder, **save_keywords(durable=False))``."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from shardtree import LoadOptions, SaveOptions

_SAVE, _LOAD = ({field.name for field in fields(kind)} for kind in (SaveOptions, LoadOptions))


def save_keywords(**keywords: Any) -> dict[str, Any]:
    """Return keywords of `save`, those of its options as a value."""
    own = {name: keywords.pop(name) for name in _SAVE & keywords.keys()}
    return keywords | ({"options": SaveOptions(**own)} if own else {})


def load_keywords(**keywords: Any) -> dict[str, Any]:
    """Return keywords of `load` and of what else reads, those of its options as a value."""
    own = {name: keywords.pop(name) for name in _LOAD & keywords.keys()}
    return keywords | ({"options": LoadOptions(**own)} if own else {})


def convert_keywords(**keywords: Any) -> dict[str, Any]:
    """Return keywords of `convert`, those of its two options as values."""
    own = {name: keywords.pop(name) for name in {"durable", "allow_pickle", "types", "progress"} & keywords.keys()}
    load = {name: value for name, value in own.items() if name in {"allow_pickle", "types"}}
    save = {name: value for name, value in own.items() if name != "types"}
    return keywords | {"load_options": LoadOptions(**load), "save_options": SaveOptions(**save)}
