"""Pictures of series: steps over time, with a metric, and those that a policy keeps."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from math import isfinite

from ..errors import plural, printable
from ..series.policies import Choose, SavedStep
from ._picture import Entry, Line, Moment, Picture

_MOST = 200


def series_picture(steps: Sequence[SavedStep], policy: Choose | None = None) -> Picture:
    """Return the picture of a series: its steps on a line by number, with a metric as height.

    Args:
        steps: The series' steps.
        policy: Retention policy, whose choice is shown; None keeps all steps.

    Examples:
        >>> from shardtree.retention import keep_last
        >>> steps = [SavedStep(number, metrics={"loss": 1 / number}) for number in (100, 200, 300)]
        >>> (line,) = series_picture(steps, keep_last(1)).rows[0]
        >>> [(moment.name, moment.tone) for moment in line.moments]
        [('100', 'goes'), ('200', 'goes'), ('300', 't0')]
    """
    stays = {step.number for step in steps} if policy is None else set(policy(steps))
    stays |= {step.number for step in steps if step.pinned}
    if not steps:
        return Picture("no steps yet", ())
    # All that stay are drawn, and of the others, as many as can be told apart.
    going = [step for step in steps if step.number not in stays]
    thin = max(1, -(-len(going) // _MOST))
    absent = {step.number for place, step in enumerate(going) if place % thin}
    points = [step for step in steps if step.number not in absent][-5 * _MOST :]
    metric = next((name for step in reversed(points) for name in sorted(step.metrics)), None)
    low, high = points[0].number, max(points[-1].number, points[0].number + 1)
    heights = _heights([step.metrics.get(metric) if metric else None for step in points])
    moments = tuple(
        Moment(
            (step.number - low) / (high - low),
            str(step.number),
            height,
            "t0" if step.number in stays else "goes",
            _title(step, stays=step.number in stays),
            step.pinned,
        )
        for step, height in zip(points, heights, strict=True)
    )
    values = [step.metrics[metric] for step in points if metric in step.metrics] if metric else []
    finite = [value for value in values if isfinite(value)]
    measure = f"{printable(metric or '')}: {min(finite):.3g} to {max(finite):.3g}" if finite else ""
    left = len(steps) - len(stays)
    counts = _many(len(steps)) + (f", {left:,} of them {'goes' if left == 1 else 'go'}" if left else "")
    notes = (
        (f"{_many(len(steps) - len(points))} that cannot be told apart are not drawn.",)
        if len(points) < len(steps)
        else ()
    )
    legend = (Entry("t0", "stays", "o"), Entry("goes", "goes", "x")) if left else ()
    pins = (Entry("pinned", "pinned", "*"),) if any(step.pinned for step in points) else ()
    span = f"{low:,} to {points[-1].number:,}" if len(points) > 1 else f"{low:,}"
    return Picture(f"{counts}, {span}", ((Line("", moments, measure),),), notes, (*legend, *pins))


def _many(steps: int) -> str:
    return plural(steps, "step").replace(str(steps), f"{steps:,}", 1)


def _heights(values: Sequence[float | None]) -> list[float | None]:
    finite = [value for value in values if value is not None and isfinite(value)]
    if not finite:
        return [None] * len(values)
    low, span = min(finite), max(finite) - min(finite)
    return [None if value is None or not isfinite(value) else (value - low) / span if span else 0.5 for value in values]


def _title(step: SavedStep, *, stays: bool) -> str:
    moment = moment_text(step.time) if step.time else ""
    when = [f"saved {moment} UTC"] if moment else []
    metrics = [f"{printable(name)} {value:.4g}" for name, value in sorted(step.metrics.items())]
    fate = [] if stays else ["goes"]
    return f"step {step.number}: " + ", ".join([*when, *metrics, *(["pinned"] if step.pinned else []), *fate])


def moment_text(seconds: float) -> str:
    """Return a time in seconds since 1970 as text, in UTC; empty if it is outside the calendar.

    Examples:
        >>> moment_text(0), moment_text(1e300)
        ('1970-01-01 00:00:00', '')
    """
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return ""
