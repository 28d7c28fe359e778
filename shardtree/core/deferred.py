"""Imports that are deferred until a name is used (PEP 562), so that a program loads only the modules that it uses."""

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

    Modules make many objects that stay. A collection among them would scan all of torch's objects too, which takes a
    third of the time of the imports.
    """
    with collector_paused():
        return importlib.import_module(module, package)


@cache
def leaf(name: str) -> typing.Any:
    """Return the function or table that `_leaves` lists under a name; its module is imported at the first call.

    Core and shell never import these modules directly: otherwise loading one tensor would import all formats.
    """
    leaves: typing.Mapping[str, str] = import_quickly("._leaves", _PACKAGE).LEAVES
    return by_name(leaves[name])


def by_name(place: str) -> typing.Any:
    """Return a module's attribute, named "module:attribute" relative to the package; the module is imported.

    Examples:
        >>> by_name("errors:TreeError").__name__
        'TreeError'
    """
    module, _, attribute = place.partition(":")
    return getattr(import_quickly(f".{module}", _PACKAGE), attribute)


def when_called(place: str) -> typing.Callable[..., typing.Any]:
    """Return a function that imports `by_name(place)` when it is called, and calls it with its arguments."""
    return partial(_call, place)


def _call(place: str, *arguments: typing.Any) -> typing.Any:
    return by_name(place)(*arguments)


def notebook_html(value: object) -> str:
    """Return the HTML of a value for a notebook: its picture, or else its text.

    The package `pictures` imports the packages of the values that it draws. To avoid a cycle of imports, these packages
    find `pictures` by name.
    """
    html: str = leaf("html_of")(value)
    return html


def later(package: str, names: typing.Mapping[str, str]) -> typing.Callable[[str], object]:
    """Return a package's `__getattr__`, which imports names from their modules, and modules under their old paths.

    Args:
        package: Full name of the package.
        names: For each module, relative to the package, the names that it defines, separated by spaces.
    """
    modules = {name: module for module, those in names.items() for name in those.split()}

    def load(name: str) -> object:
        value = getattr(import_quickly(modules[name], package), name) if name in modules else _moved(package, name)
        if value is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])
        # A value that the caller has set under this name stays.
        return vars(sys.modules[package]).setdefault(name, value)

    return load


def _moved(package: str, name: str) -> types.ModuleType | None:
    """Return the module that once had this import path; None if there was none."""
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
    """Return the `__getattr__` and `__dir__` of a face: a public module whose names are defined in inner packages.

    Args:
        name: Full name of the face.
        names: Public names.
        room: Package that defines them, relative to the face.
        elsewhere: Names that other packages define, in the form that `later` takes.
    """
    # With a `__path__` the face counts as a package, so that old imports of modules below it still work.
    vars(sys.modules[name]).setdefault("__path__", [])
    others = {known for those in elsewhere.values() for known in those.split()}
    here = " ".join(known for known in names if known not in others)
    return later(name, {room: here, **elsewhere}), lambda: sorted(names)
