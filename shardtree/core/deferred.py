"""Imports that are put off until a name is asked for (PEP 562), so that a program loads what it uses."""

from __future__ import annotations

import importlib
import sys
import types
import typing
from collections.abc import Sequence
from functools import cache, partial

from .ambient import collector_paused

_PACKAGE = "shardtree"


def import_quickly(module: str, package: str) -> types.ModuleType:
    """Import a module by its name, relative to a package, with the collector paused.

    Modules make many objects that stay. A collection among them would look through all of torch's, which takes as long
    as a third of the imports themselves.
    """
    with collector_paused():
        return importlib.import_module(module, package)


@cache
def leaf(name: str) -> typing.Any:
    """Return the function or table that `_leaves` lists under a name; its module is imported at the first call.

    Core and shell import nothing of the kind: else whoever loads one tensor would load all formats.
    """
    leaves: typing.Mapping[str, str] = import_quickly("._leaves", _PACKAGE).LEAVES
    return by_name(leaves[name])


def by_name(place: str) -> typing.Any:
    """Return an attribute of a module of the package, given as "module:attribute"; the module is imported.

    Examples:
        >>> by_name("errors:TreeError").__name__
        'TreeError'
    """
    module, _, attribute = place.partition(":")
    return getattr(import_quickly(f".{module}", _PACKAGE), attribute)


def when_called(place: str) -> typing.Callable[..., typing.Any]:
    """Return the function that is at a place, as `by_name` takes it, imported once it is called."""
    return partial(_call, place)


def _call(place: str, *arguments: typing.Any) -> typing.Any:
    return by_name(place)(*arguments)


def notebook_html(value: object) -> str:
    """Return the HTML of a value for a notebook: its picture, or its text.

    Pictures are drawn in a room that imports the rooms of what they show, so that these find it by its name.
    """
    html: str = leaf("html_of")(value)
    return html


def later(package: str, names: typing.Mapping[str, str]) -> typing.Callable[[str], object]:
    """Return a package's `__getattr__`: it loads a name from its module, or a module that was below the package before.

    Args:
        package: Full name of the package.
        names: Names of each module, with spaces between them; modules are relative to the package.
    """
    modules = {name: module for module, those in names.items() for name in those.split()}

    def load(name: str) -> object:
        value = getattr(import_quickly(modules[name], package), name) if name in modules else _moved(package, name)
        if value is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])
        # What the caller has put in the place of a name stays.
        return vars(sys.modules[package]).setdefault(name, value)

    return load


def _moved(package: str, name: str) -> types.ModuleType | None:
    """Return the module that had a name below a package before modules moved, None if there was none."""
    old = f"{package}.{name}"
    new: str = leaf("new_address")(old)
    if name.startswith("_") or new == old:
        return None
    try:
        return import_quickly(old, package)
    except ModuleNotFoundError as error:
        if error.name not in (old, new):
            raise
        return None


def face(
    name: str, names: Sequence[str], room: str, elsewhere: typing.Mapping[str, str] = types.MappingProxyType({})
) -> tuple[typing.Callable[[str], object], typing.Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of a face, the module that shows the public names of rooms further down.

    Args:
        name: Name of the face.
        names: Public names.
        room: Package that has them, relative to the face.
        elsewhere: Names that other packages have, as `later` takes them.
    """
    # What was imported from below a face, before rooms moved under it, is found there still.
    vars(sys.modules[name]).setdefault("__path__", [])
    others = {known for those in elsewhere.values() for known in those.split()}
    here = " ".join(known for known in names if known not in others)
    return later(name, {room: here, **elsewhere}), lambda: sorted(names)
