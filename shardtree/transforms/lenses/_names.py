"""Which tensors a lens stores in: a part of the key replaced by others, which works for optimizer states' keys too."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import TreeError, error_text


def replaced_part(doing: str, key: str, part: str, name: str) -> str:
    """Return a key in which one part, or several beside each other, is another.

    Args:
        doing: for the error.
        key: names between dots.
        part: some of them, with dots between; it is there once.
        name: what stands in its place.

    Raises:
        TreeError: the part isn't there, or more than once.

    Examples:
        >>> replaced_part("gate_and_up", "optimizer.state.exp_avg.layers.0.fc1.weight", "fc1", "up_proj")
        'optimizer.state.exp_avg.layers.0.up_proj.weight'
    """
    dotted = f".{key}."
    count = sum(dotted.startswith(f".{part}.", at) for at in range(len(dotted)))
    if count != 1:
        found = f"{count} times in {key!r}"
        fix = "Name the part of the key that is replaced, with the parts beside it where it is there twice."
        what = f"{doing}: no place for the names"
        raise TreeError(error_text(what, found=f"{part!r} {found}", expected="once", fix=fix))
    return dotted.replace(f".{part}.", f".{name}.", 1)[1:-1]


def check_names(doing: str, part: str | None, names: Sequence[str] | None, count: int) -> None:
    """Raise unless there are a part and as many different names as needed, or neither.

    Raises:
        TreeError: says what is wrong.

    Examples:
        >>> check_names("gate_and_up", "fc1", ("gate_proj", "up_proj"), 2)
    """
    if part is None and names is None:
        return
    listed = [names] if isinstance(names, str) else list(names or ())
    texts = [part, *listed]
    is_sound = isinstance(names, Sequence) and not isinstance(names, str)
    if not (
        is_sound and all(isinstance(text, str) and text for text in texts) and len(set(listed)) == len(listed) == count
    ):
        found, expected = f"part={part!r}, names={names!r}"[:300], f"a part of the key, and {count} different names"
        fix = "Pass both, or neither: then all is stored in one tensor under the same key."
        raise TreeError(error_text(f"{doing}: not names of parts", found=found, expected=expected, fix=fix))
