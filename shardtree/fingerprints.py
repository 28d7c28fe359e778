"""Fingerprints: one number for each tensor, a sum over its elements that doesn't depend on the sharding.

The number depends on key, dtype, global shape and the elements' bits, so that it is the same in every layout and
format. docs/checks.md defines it to the bit.
"""

from __future__ import annotations

import typing

from .core.deferred import face

__all__ = [
    "PartialFingerprint",
    "add_fingerprints",
    "partial_fingerprints",
]

if typing.TYPE_CHECKING:
    from .core.fingerprints import PartialFingerprint, add_fingerprints, partial_fingerprints
else:
    __getattr__, __dir__ = face(
        __name__,
        __all__,
        "..core.fingerprints",
    )
