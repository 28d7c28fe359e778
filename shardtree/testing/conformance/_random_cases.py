"""Random states in random layouts, for what the plain cases miss; failures are shrunk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from random import Random

from hypothesis import Phase, find, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from .._layouts import Layout
from .._states import GlobalState, state_layouts
from .._tensors import shapes, tensors
from ._layout_cases import LOADS
from ._report import Refused
from ._subject import Case, Promise, Subject, check_reloaded


@dataclass(frozen=True, slots=True, eq=False)
class Reload:
    """A state, its layout when it is saved, and its layout when it is loaded."""

    state: GlobalState
    saved: dict[str, Layout]
    loaded: dict[str, Layout]


@st.composite
def reloads(draw: st.DrawFn) -> Reload:
    """Return a strategy for states of one or two tensors, saved on 1 to 4 ranks and loaded on 1 to 4."""
    named = st.dictionaries(st.sampled_from(["w", "a.w"]), tensors(shapes(max_axes=3)), min_size=1, max_size=2)
    state = GlobalState(draw(named), {}, {})
    one, other = (draw(state_layouts(state, draw(st.integers(1, 4)))) for _ in range(2))
    return Reload(state, one, other)


def states(subject: Subject) -> Iterator[Case]:
    """Yield the search for a state and two layouts for which the round trip fails."""
    if subject.examples:
        yield Case(f"{subject.examples} random states", partial(_check_random, subject))


def _check_random(subject: Subject) -> None:
    # A fixed seed and no database: the same states are tried each time, in other people's test suites too.
    options = settings(
        max_examples=subject.examples, deadline=None, database=None, phases=[Phase.generate, Phase.shrink]
    )
    with suppress(NoSuchExample):
        worst = find(reloads(), lambda case: _failure(subject, case) is not None, settings=options, random=Random(0))
        if (error := _failure(subject, worst)) is not None:
            text = f"{type(error).__name__}: {error}\n{worst.state}\nsaved {worst.saved}\nloaded {worst.loaded}"
            raise AssertionError(text) from error


def _failure(subject: Subject, case: Reload) -> Exception | None:
    """Return what a case raises, unless the format refuses it."""
    try:
        check_reloaded(subject, case.state, case.saved, case.loaded)
    except Refused:
        return None
    except Exception as error:
        return error
    return None


PROMISES = (Promise("random states come back in random layouts", LOADS, states),)
