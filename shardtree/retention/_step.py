"""One step of a listing: what policies decide by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SavedStep:
    """A finished checkpoint of a series, as far as a listing tells.

    Attributes:
        number: of the training step, 0 or more.
        time: when it was saved, in seconds since 1970.
        metrics: what was measured of it, by name.
        pinned: whether it is kept whatever a policy says.
        folder: its name under the series' root.

    Examples:
        >>> SavedStep(100, metrics={"loss": 0.5})
        SavedStep(number=100, time=0.0, metrics={'loss': 0.5}, pinned=False, folder='')
    """

    number: int
    time: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    pinned: bool = False
    folder: str = ""
