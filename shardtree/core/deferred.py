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
    """Import a module by its name, relative to a package, with Python's garbage collector paused.

    Imports create many objects that stay, which would trigger collections. These would scan all of torch's objects too,
    and take a third of the imports' time.
    """
    with collector_paused():
        return importlib.import_module(module, package)


@cache
def leaf(name: str) -> typing.Any:
    """Return the object that the table in `_leaves` lists under a name, importing its module at the first call.

    Core and shell get everything that they use of other packages in this way. If they imported it directly, loading one
    tensor would import all formats.
    """
    leaves: typing.Mapping[str, str] = import_quickly("._leaves", _PACKAGE).LEAVES
    return by_name(leaves[name])


def by_name(place: str) -> typing.Any:
    """Import a module, and return one of its attributes.

    Args:
        place: Text "module:attribute", with the module's name relative to shardtree.

    Examples:
        >>> by_name("errors:TreeError").__name__
        'TreeError'
    """
    module, _, attribute = place.partition(":")
    return getattr(import_quickly(f".{module}", _PACKAGE), attribute)


def when_called(place: str) -> typing.Callable[..., typing.Any]:
    """Return a function that calls `by_name(place)`, whose module is imported only at the first call."""
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
    """Return a `__getattr__` for a package that imports a name's module when the name is first used.

    It also finds modules of the package under the import paths of earlier releases.

    Args:
        package: Full name of the package.
        names: Dict from a module, relative to the package, to the names that it defines, separated by spaces.
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
    """Return the module that had the import path ``package.name`` in an earlier release; None if none had."""
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
        name: Full name of the public module.
        names: Public names of this module.
        room: Package that defines the names not in `elsewhere`, relative to the public module.
        elsewhere: Dict from another package, relative to the public module, to the names that it defines, separated by
            spaces.
    """
    # With a `__path__` the face counts as a package, so that old imports of modules below it still work.
    vars(sys.modules[name]).setdefault("__path__", [])
    others = {known for those in elsewhere.values() for known in those.split()}
    here = " ".join(known for known in names if known not in others)
    return later(name, {room: here, **elsewhere}), lambda: sorted(names)
