"""Modules that moved, under the names that they had: pickles and programs name them so, and they stay one module."""

from __future__ import annotations

import sys
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

from ._moved import new_address


class _OldNames(MetaPathFinder, Loader):
    """An import of an old name, which gives the module that is there now, not a second one of the same text."""

    def find_spec(self, fullname: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return a spec for an old name, None for all others."""
        now = new_address(fullname)
        if now == fullname:
            return None
        # What isn't there now is left to the usual finder, whose error names what was asked for.
        with suppress(ModuleNotFoundError):
            return None if find_spec(now) is None else ModuleSpec(fullname, self)
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Put the module that is there now in the place of the new and empty one, as the import system allows."""
        now = import_module(new_address(module.__name__))
        # Another thread that waits for this import may hold the empty one already.
        vars(module)["__getattr__"] = partial(getattr, now)
        sys.modules[module.__name__] = now


def install() -> None:
    """Let this process import old names."""
    # Asked first: below a package that moved, the usual finder would find the file, and load it once more.
    if not any(isinstance(each, _OldNames) for each in sys.meta_path):
        sys.meta_path.insert(0, _OldNames())
