"""Numbers in arguments, converted to ints and tuples of ints, or refused by the argument's name."""

from __future__ import annotations

import operator
from typing import Any, NoReturn

from ..errors import CheckpointingException, MetadataError, error_text


def refuse(
    subject: str, field: str, found: object, expected: str, fix: str, *, error: type[CheckpointingException]
) -> NoReturn:
    """Raise `error` with the field that doesn't fit, what was found and expected, and what to do."""
    raise error(error_text(f"{subject}: {field} doesn't fit", found=found, expected=expected, fix=fix))


def check_type(subject: str, field: str, value: object, kind: type, fix: str) -> None:
    """Raise MetadataError unless a value has the type.

    Examples:
        >>> check_type("ShardedTensor 'w'", "allow_shape_mismatch", True, bool, "Pass a bool.")
    """
    if not isinstance(value, kind):
        refuse(subject, field, type(value).__name__, f"a {kind.__name__}", fix, error=MetadataError)


def integer(subject: str, field: str, value: Any) -> int:
    """Return an int-like value as an int; a bool, a float or a string raises MetadataError.

    Examples:
        >>> import numpy
        >>> integer("ShardedTensor 'w'", "local_shape[0]", numpy.int64(4))
        4
    """
    try:
        # A bool is an int to Python; as a size or index it is most likely a misplaced argument.
        if isinstance(value, bool):
            raise TypeError
        # By `__index__`, which NumPy's integers have, and floats and texts don't.
        return int(operator.index(value))
    except TypeError:
        fix = "Convert it with int() where that loses nothing."
        refuse(subject, field, type(value).__name__, "an int", fix, error=MetadataError)


def integers(subject: str, field: str, values: Any) -> tuple[int, ...]:
    """Return a sequence of int-like values as a tuple of ints, or raise MetadataError.

    Examples:
        >>> integers("ShardedTensor 'w'", "local_shape", [4, 2])
        (4, 2)
    """
    try:
        items = tuple(values)
    except TypeError:
        fix = "Pass one int for each axis."
        refuse(subject, field, type(values).__name__, "a tuple of ints", fix, error=MetadataError)
    return tuple(integer(subject, f"{field}[{axis}]", item) for axis, item in enumerate(items))


def flat_range(subject: str, value: Any) -> slice | None:
    """Return a flat range as slice(start, stop) of ints, None as it is; anything else raises MetadataError.

    Examples:
        >>> flat_range("ShardedTensor 'w'", slice(2, 5, 1))
        slice(2, 5, None)
    """
    if value is None:
        return None
    fix = "Pass slice(start, stop) with 0 <= start <= stop."
    if not isinstance(value, slice) or value.step not in (None, 1):
        refuse(subject, "flattened_range", value, "a slice with step 1", fix, error=MetadataError)
    start = integer(subject, "flattened_range.start", value.start)
    stop = integer(subject, "flattened_range.stop", value.stop)
    if not 0 <= start <= stop:
        refuse(subject, "flattened_range", value, "0 <= start <= stop", fix, error=MetadataError)
    return slice(start, stop)
