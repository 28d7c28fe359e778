"""An import hook for the old names of moved modules, which pickles and programs still contain."""

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
    """Finder and loader for old module names; an import returns the moved module itself, not a second copy of it."""

    def find_spec(self, fullname: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return a spec for the old name of a moved module; None for any other name, or if no such module exists."""
        now = new_address(fullname)
        if now == fullname:
            return None
        # If the new module doesn't exist, the usual finder raises an error that names the requested one.
        with suppress(ModuleNotFoundError):
            return None if find_spec(now) is None else ModuleSpec(fullname, self)
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Put the moved module into `sys.modules` in place of `module`, which is empty; the import then returns it."""
        now = import_module(new_address(module.__name__))
        # Another thread that waits for this import may have the empty module already, so it forwards its attributes.
        vars(module)["__getattr__"] = partial(getattr, now)
        sys.modules[module.__name__] = now


def install() -> None:
    """Install the finder of old module names in this process, unless it is installed already."""
    # This finder is the first: below a moved package, the usual one would find the file and load it a second time.
    if not any(isinstance(each, _OldNames) for each in sys.meta_path):
        sys.meta_path.insert(0, _OldNames())
