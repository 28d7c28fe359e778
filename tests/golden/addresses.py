"""Every public address of shardtree, and that by which pickles name the class or function there, one a line.

`python tests/golden/addresses.py > addresses.txt`, run in a checkout of commit 73b114f, wrote the list beside this
module: the last one before modules moved. It is frozen; tests/test_addresses.py imports each address.
"""

from __future__ import annotations

import ast
import pkgutil
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import shardtree


def public_modules() -> Iterator[ModuleType]:
    """Yield the package and every module below it whose path has no underscore in front of a part."""
    yield shardtree
    for found in pkgutil.walk_packages(shardtree.__path__, "shardtree."):
        if not any(part.startswith("_") for part in found.name.split(".")):
            yield import_module(found.name)


def public_names(module: ModuleType) -> list[str]:
    """Return the names of `__all__`, or else those defined in the module, exported as themselves or by a package."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    names = list[str]()
    for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            # A package's face has what it imports from its own modules.
            is_own = node.level == 1 and hasattr(module, "__path__")
            names += [alias.asname or alias.name for alias in node.names if is_own or alias.asname == alias.name]
    for line in ast.parse(Path(str(module.__file__)).read_text()).body:
        targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
        names += [target.id for target in targets if isinstance(target, ast.Name)]
        names += [line.name] if isinstance(line, (ast.FunctionDef, ast.ClassDef)) else []
    return sorted({name for name in names if name[0] != "_" and hasattr(module, name)})


def pickled_as(value: Any) -> str:
    """Return the address by which a pickle names one of our classes or functions; nothing for other values."""
    is_ours = isinstance(value, (type, FunctionType)) and value.__module__.startswith("shardtree.")
    return f"{value.__module__}.{value.__qualname__}" if is_ours and value.__qualname__.isidentifier() else ""


if __name__ == "__main__":
    for face in public_modules():
        sys.stdout.write(f"{face.__name__}\n")
        for name in public_names(face):
            sys.stdout.write(f"{face.__name__}.{name} {pickled_as(getattr(face, name))}".rstrip() + "\n")
