"""Partition specs for the tensors of a tree: one for all, a tree of them, by patterns of keys, or by a function."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from ...errors import KeyMismatch, MetadataError, TreePath, error_text, render_path
from ...trees import call_at, key_expression, leaves_with_paths
from ._spec import PartitionSpec, checked_spec

SpecFunction: TypeAlias = Callable[[str, Any], PartitionSpec]
"""From a tensor's key and its leaf to how it is cut."""

Specs: TypeAlias = Any
"""A PartitionSpec for all tensors, a tree of them, or a function. In a tree each spec holds for all that stands at its
place and below, as in JAX; plain values need none."""


def specs_by_pattern(patterns: Mapping[str, PartitionSpec], default: PartitionSpec | None = None) -> SpecFunction:
    """Return the function that gives a tensor the spec of the first pattern that fits its key.

    Args:
        patterns: keys, in which ``*`` stands for one part between dots and ``**`` for any number of them.
        default: for keys that no pattern matches; without, they are an error.

    Returns:
        ``(key, leaf) -> PartitionSpec``, which raises KeyMismatch for a key that no pattern matches.

    Raises:
        TreeError: a pattern isn't a text, or is empty.
        MetadataError: what stands beside a pattern, or the default, isn't a PartitionSpec; or there is no dict of them.

    Examples:
        >>> specs = specs_by_pattern({"layers.*.up.weight": PartitionSpec("tp")}, default=PartitionSpec())
        >>> specs("layers.3.up.weight", None), specs("norm.weight", None)
        (PartitionSpec('tp'), PartitionSpec())
        >>> specs_by_pattern({"**.bias": PartitionSpec("tp")})("layers.3.up.bias", None)
        PartitionSpec('tp')
    """
    if not isinstance(patterns, Mapping):
        found, fix = type(patterns).__name__, "Say which keys a spec is for: {'**.weight': PartitionSpec('tp')}."
        raise MetadataError(error_text("specs_by_pattern: not a dict of specs", found=found, fix=fix))
    if default is not None:
        checked_spec("default", default)
    rows = [
        (re.compile(key_expression(pattern), re.DOTALL), checked_spec(f"pattern {pattern!r}", spec))
        for pattern, spec in patterns.items()
    ]
    listed = ", ".join(map(repr, patterns))

    def spec_of(key: str, leaf: Any) -> PartitionSpec:
        found = next((spec for expression, spec in rows if expression.fullmatch(key)), default)
        if found is None:
            fix = "Add a pattern for it, or pass default=PartitionSpec() for tensors that aren't cut."
            what = f"specs_by_pattern: no pattern matches {key!r}"
            raise KeyMismatch(error_text(what, found=listed[:1000] or "no patterns", fix=fix))
        return found

    return spec_of


def spec_finder(specs: Specs, tree: Any) -> Callable[[TreePath, str, Any], PartitionSpec]:
    """Return the function from a tensor's path, key and leaf to its spec.

    Raises:
        MetadataError: a tree of specs holds something else, or has a place that the tree hasn't.
    """
    if isinstance(specs, PartitionSpec):
        return lambda path, key, leaf: specs
    if callable(specs):
        return lambda path, key, leaf: checked_spec(repr(key), call_at(path, specs, key, leaf))
    places = {path: spec for path, spec in leaves_with_paths(specs) if spec is not None}
    for path, spec in places.items():
        checked_spec(f"spec at {render_path(path, 'specs')}", spec)
    beyond = [render_path(path, "specs") for path in places if not _reaches(tree, path)]
    if beyond:
        fix = "Give specs at places that the tree has."
        raise MetadataError(error_text("specs for what isn't in the tree", offenders=beyond, fix=fix))
    return lambda path, key, leaf: _spec_at(places, path, key)


def _reaches(tree: Any, path: TreePath) -> bool:
    for entry in path:
        try:
            tree = tree[entry]
        except (KeyError, IndexError, TypeError):
            return False
    return True


def _spec_at(places: Mapping[TreePath, PartitionSpec], path: TreePath, key: str) -> PartitionSpec:
    found = next((places[path[:depth]] for depth in range(len(path) + 1) if path[:depth] in places), None)
    if found is None:
        fix = "Give a PartitionSpec at its place, or at one above it; PartitionSpec() where it isn't cut."
        raise MetadataError(error_text(f"{key!r}: no spec at {render_path(path, 'specs')}", fix=fix))
    return found
