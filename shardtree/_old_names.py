"""Imports of moved modules by their old names, which pickles and programs contain."""

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
    """Finder and loader of old names; an import returns the moved module itself, not a second copy of it."""

    def find_spec(self, fullname: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return a spec for an old name, None for all others."""
        now = new_address(fullname)
        if now == fullname:
            return None
        # If the new module doesn't exist, the usual finder raises an error that names the requested one.
        with suppress(ModuleNotFoundError):
            return None if find_spec(now) is None else ModuleSpec(fullname, self)
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Replace the new, empty module in `sys.modules` with the moved one, as the import system allows."""
        now = import_module(new_address(module.__name__))
        # Another thread that waits for this import may have the empty module already, so it forwards its attributes.
        vars(module)["__getattr__"] = partial(getattr, now)
        sys.modules[module.__name__] = now


def install() -> None:
    """Let this process import old names."""
    # This finder is the first: below a moved package, the usual one would find the file and load it a second time.
    if not any(isinstance(each, _OldNames) for each in sys.meta_path):
        sys.meta_path.insert(0, _OldNames())
