"""Arrays of objects, such as one random state per rank, and rules that change an array's shape."""

from __future__ import annotations

import typing

from .core.deferred import face

__all__ = [
    "ObjectArray",
    "ObjectRule",
    "ShapeChange",
    "concatenate_objects",
    "drop_objects",
    "fold_objects",
    "redistribute_objects",
    "replicate_cell",
    "replicate_objects",
    "reshard_objects",
    "rules_by_field",
]

if typing.TYPE_CHECKING:
    from .core.layouts import ObjectArray, ObjectRule, ShapeChange, reshard_objects
    from .transforms import drop_objects
    from .transforms._object_rules import (
        concatenate_objects,
        fold_objects,
        redistribute_objects,
        replicate_cell,
        replicate_objects,
        rules_by_field,
    )
else:
    __getattr__, __dir__ = face(
        __name__,
        __all__,
        "..transforms._object_rules",
        {
            "..core.layouts": "ObjectArray ObjectRule ShapeChange reshard_objects",
            "..transforms": "drop_objects",
        },
    )
