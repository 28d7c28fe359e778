"""How steps' folders are named, and a folder that is on its way out."""

from __future__ import annotations

import re
import secrets
from functools import cache
from string import Formatter

from ...errors import MetadataError, error_text

_SET_ASIDE = re.compile(r"\.(?P<folder>.+)\.[0-9a-f]{16}\.removed", re.DOTALL)


def check_names(names: object) -> None:
    """Raise unless a format gives each step a folder's name of its own, which tells the step.

    Raises:
        MetadataError: it doesn't.
    """
    try:
        fine = isinstance(names, str) and all(step_number(names, step_folder(names, one)) == one for one in (0, 12345))
    except (ValueError, LookupError, AttributeError):
        fine = False
    if not fine or "/" in str(names) or "\0" in str(names) or _SET_ASIDE.fullmatch(step_folder(str(names), 1)):
        expected = "text with one number in it, such as 'step_{:08d}', 'iter_{:07d}' or '{}'"
        raise MetadataError(error_text("series: no names for steps", found=repr(names)[:200], expected=expected))


def step_folder(names: str, number: int) -> str:
    """Return the name of a step's folder.

    Examples:
        >>> step_folder("step_{:08d}", 42)
        'step_00000042'
    """
    return names.format(number)


def step_number(names: str, folder: str) -> int | None:
    """Return the step that a folder is named for, with any number of leading zeros; None if it is no step's name.

    Examples:
        >>> step_number("step_{:08d}", "step_42"), step_number("step_{:08d}", "notes")
        (42, None)
    """
    found = _pattern(names).fullmatch(folder)
    return int(found[1]) if found else None


@cache
def _pattern(names: str) -> re.Pattern[str]:
    (before, name, *_), *rest = Formatter().parse(names)
    if name is None or any(field is not None for _, field, *_ in rest):
        raise ValueError("not one number")
    after = "".join(text for text, *_ in rest)
    # Longer numbers than anybody's would only cost time.
    return re.compile(f"{re.escape(before)}([0-9]{{1,18}}){re.escape(after)}")


def aside_name(folder: str) -> str:
    """Return a name that nobody else has, for a folder that is on its way out.

    Examples:
        >>> set_aside_from(aside_name("step_00000042"))
        'step_00000042'
    """
    return f".{folder}.{secrets.token_hex(8)}.removed"


def set_aside_from(name: str) -> str | None:
    """Return what a folder was called that is on its way out, None for any other name."""
    found = _SET_ASIDE.fullmatch(name)
    return found["folder"] if found else None
