"""Retention: which steps of a series of checkpoints are kept, as pure functions over an immutable listing."""

from __future__ import annotations

import typing

from .core.deferred import face

__all__ = [
    "RetentionPolicy",
    "SavedStep",
    "best_step",
    "keep_all",
    "keep_any",
    "keep_best",
    "keep_every",
    "keep_every_seconds",
    "keep_for",
    "keep_last",
    "keep_steps",
    "kept_steps",
]

if typing.TYPE_CHECKING:
    from .series.policies import (
        RetentionPolicy,
        SavedStep,
        best_step,
        keep_all,
        keep_any,
        keep_best,
        keep_every,
        keep_every_seconds,
        keep_for,
        keep_last,
        keep_steps,
        kept_steps,
    )
else:
    __getattr__, __dir__ = face(
        __name__,
        __all__,
        "..series.policies",
    )
