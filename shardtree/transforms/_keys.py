"""Patterns of keys: plain text in which each ``*`` stands for one part between dots."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..errors import TreeError, error_text

_PART = "([^.]+)"


def key_expression(pattern: str) -> str:
    r"""Return a pattern as a regular expression with one group for each star.

    Raises:
        TreeError: it isn't a text, or an empty one.

    Examples:
        >>> key_expression("model.layers.*.weight")
        'model\\.layers\\.([^.]+)\\.weight'
    """
    if not isinstance(pattern, str) or not pattern:
        found, fix = repr(pattern)[:200], "Write a key, with * for parts that differ: 'model.layers.*.mlp.weight'."
        raise TreeError(error_text("not a pattern of keys", found=found, expected="a text", fix=fix))
    return re.escape(pattern).replace(r"\*", _PART)


def stars(pattern: str) -> int:
    """Return how many stars a pattern has.

    Examples:
        >>> stars("layers.*.experts.*.weight")
        2
    """
    return pattern.count("*")


def match_key(pattern: str, key: str) -> tuple[str, ...] | None:
    """Return what stands in a key for each star of a pattern, None where the key doesn't match.

    Examples:
        >>> match_key("layers.*.weight", "layers.11.weight"), match_key("layers.*.weight", "layers.11.bias")
        (('11',), None)
    """
    found = re.fullmatch(key_expression(pattern), key)
    return None if found is None else found.groups()


def fill_key(pattern: str, parts: Sequence[str]) -> str:
    """Return a pattern with each star replaced, in order; the caller has counted them.

    Examples:
        >>> fill_key("model.layers.*.weight", ["11"])
        'model.layers.11.weight'
    """
    rest = iter(parts)
    return re.sub(r"\*", lambda _: next(rest), pattern)


def check_stars(doing: str, pattern: str, others: Sequence[str]) -> None:
    """Raise unless the other patterns have as many stars as the first.

    Raises:
        TreeError: names each pattern that has more or fewer.

    Examples:
        >>> check_stars("split_tensor", "layers.*.qkv", ["layers.*.q", "layers.*.k"])
    """
    wrong = [f"{other!r} has {stars(other)}" for other in others if stars(other) != stars(pattern)]
    if wrong:
        expected = f"as many * as {pattern!r}, which has {stars(pattern)}"
        fix = "Each * is filled in with what stood there in the key."
        raise TreeError(
            error_text(f"{doing}: patterns that can't be filled in", expected=expected, offenders=wrong, fix=fix)
        )
