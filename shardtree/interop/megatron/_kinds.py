"""Which kind of Megatron-Core's leaves a value is, and what is said of a leaf that has no counterpart."""

from __future__ import annotations

from typing import Any, Final

from ...errors import TreePath, error_text, render_path
from ...mapping import LocalNonpersistentObject, ShardedBase

# Other libraries have a ShardedTensor too (torch.distributed has), so a name alone doesn't tell.
_TOLD_BY: Final = {
    "ShardedTensor": ("key", "data", "local_shape", "global_shape", "global_offset"),
    "ShardedObject": ("key", "data", "global_shape", "global_offset"),
    "ShardedTensorFactory": ("key", "data", "build_fn", "merge_fn"),
    "LocalNonpersistentObject": ("obj",),
}


def kind_of(leaf: Any) -> str | None:
    """Return the name of the Megatron-Core class that a leaf is of, or None: it's ours, or anything else.

    Examples:
        >>> kind_of(LocalNonpersistentObject(3)), kind_of(3.5)
        (None, None)
    """
    if isinstance(leaf, (ShardedBase, LocalNonpersistentObject, type)):
        return None
    names = (base.__name__ for base in type(leaf).__mro__)
    return next((name for name in names if name in _TOLD_BY and all(hasattr(leaf, a) for a in _TOLD_BY[name])), None)


def describe_failure(doing: str, kind: str, leaf: Any, path: TreePath, error: Exception, fix: str | None = None) -> str:
    """Return an error's text for a leaf that can't be turned into the other library's."""
    what = f"{doing}: {kind} {getattr(leaf, 'key', '')!r} at {render_path(path)}"
    return error_text(what, offenders=[line.strip() for line in str(error).splitlines()], fix=fix)
