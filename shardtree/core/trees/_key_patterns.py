"""Patterns of keys, and suggestions for mistyped keys and patterns.

A pattern is plain text in which ``*`` matches one part between dots, and ``**`` any number of parts. Beside other
characters ``*`` matches any number of characters of that part, or none: ``exp_avg*`` fits ``exp_avg`` and
``exp_avg_sq``. All of shardtree uses this language for keys: specs, rules, renamings and the command line.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from itertools import chain, islice, zip_longest

from ...errors import KeyMismatch, TreeError, error_text, plural
from ._key_forms import FormPiece, KeyForm, expression_of, is_quick, text_piece

_STAR = re.compile(r"\*\*\.|\.\*\*$|\*\*?")
# The dot beside ** is part of the star: if ** matches no part, the dot is absent too.
_KINDS = {"**.": "parts before", ".**": "parts after", "**": "anything"}


def key_form(pattern: str) -> KeyForm:
    """Compile a pattern of keys to a `KeyForm`, whose `match` returns the text of each star.

    Raises:
        TreeError: The pattern isn't a string, or is empty.

    Examples:
        >>> key_form("model.layers.*.weight").match("model.layers.7.weight")
        ('7',)
    """
    if not isinstance(pattern, str) or not pattern:
        found, fix = repr(pattern)[:200], "Write a key, with * for parts that differ: 'model.layers.*.mlp.weight'."
        raise TreeError(error_text("not a pattern of keys", found=found, expected="a non-empty string", fix=fix))
    return _key_form(pattern)


@lru_cache
def _key_form(pattern: str) -> KeyForm:
    texts = map(text_piece, _STAR.split(pattern))
    between = [FormPiece(_KINDS.get(star[0]) or _star_kind(pattern, star)) for star in _STAR.finditer(pattern)]
    pieces = chain.from_iterable(zip_longest(texts, between, fillvalue=text_piece("")))
    return KeyForm(tuple(piece for piece in pieces if piece != text_piece("")))


def _star_kind(pattern: str, star: re.Match[str]) -> str:
    around = pattern[: star.start()][-1:] + pattern[star.end() :][:1]
    # A star between dots is a part, which has at least one character.
    return "part" if around in ("", ".", "..") else "characters"


def stars(pattern: str) -> int:
    """Return the number of stars in a pattern.

    Examples:
        >>> stars("layers.*.experts.*.weight")
        2
    """
    return len(_STAR.findall(pattern))


def match_key(pattern: str, key: str) -> tuple[str, ...] | None:
    """Return the text in a key that each star of a pattern matches; None if the key doesn't match.

    Examples:
        >>> match_key("layers.*.weight", "layers.11.weight"), match_key("layers.*.weight", "layers.11.bias")
        (('11',), None)
        >>> match_key("**.weight", "layers.11.weight"), match_key("**.weight", "weight")
        (('layers.11',), ('',))
    """
    match = key_form(pattern).match(key)
    return None if match is None else tuple(part.strip(".") for part in match)


def key_matcher(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Return a predicate: whether a key matches any of the patterns.

    Raises:
        TreeError: A pattern isn't a string, or is empty.

    Examples:
        >>> [*filter(key_matcher(["**.exp_avg*", "step"]), ["a.exp_avg", "a.exp_avg_sq", "a.exp_avg.b", "step"])]
        ['a.exp_avg', 'a.exp_avg_sq', 'step']
    """
    # One expression serves all patterns, since there may be millions of keys.
    forms = [key_form(pattern) for pattern in patterns]
    expressions = [f"(?:{expression_of(form.pieces, groups=False)})" for form in forms]
    quick = [min(lengths) for lengths in zip(*(form.quick for form in forms), strict=True)]
    return partial(_fits_one, re.compile("|".join(expressions)), quick, forms) if forms else _fits_none


def _fits_none(key: str) -> bool:
    return False


def _fits_one(expression: re.Pattern[str], quick: Sequence[int], forms: Sequence[KeyForm], key: str) -> bool:
    if is_quick(key, quick):
        return expression.fullmatch(key) is not None
    return any(form.match(key) is not None for form in forms)


def shell_differences(patterns: Iterable[str], keys: Collection[str]) -> list[str]:
    """Return a line for each pattern that doesn't match the same keys here as in a shell.

    In a shell, ``*`` matches dots too, and ``?`` and ``[...]`` are special. If ``**`` in place of ``*`` matches the
    shell's keys, the line says so. Patterns with ``**`` are left out, since their author knows that this isn't a shell.

    Examples:
        >>> shell_differences(["*.w", "a.**", "a.*.w"], ["a.b.w", "a.c.d.w"])
        ["'*.w' fits 0 keys, a shell's 2: write '**.w'", "'a.*.w' fits 1 key, a shell's 2: write 'a.**.w'"]
    """
    lines = []
    for pattern in dict.fromkeys(patterns):
        if "**" in pattern or not set("*?[") & set(pattern):
            continue
        here, there = set(filter(key_matcher([pattern]), keys)), {key for key in keys if fnmatchcase(key, pattern)}
        wide = pattern.replace("*", "**")
        fix = f": write {wide!r}" if there and set(filter(key_matcher([wide]), keys)) == there else ""
        if here != there:
            lines.append(f"{pattern!r} fits {plural(len(here), 'key')}, a shell's {len(there)}{fix}")
    return lines


def fill_key(pattern: str, parts: Sequence[str]) -> str:
    """Return a pattern with its stars replaced by `parts`, in order; there must be one part for each star.

    Examples:
        >>> fill_key("model.layers.*.weight", ["11"])
        'model.layers.11.weight'
        >>> fill_key("**.weight", ["layers.11"]), fill_key("**.weight", [""])
        ('layers.11.weight', 'weight')
    """
    rest = iter(parts)

    def fill(star: re.Match[str]) -> str:
        part = next(rest)
        return star[0].replace("**", part).replace("*", part) if part else ""

    return _STAR.sub(fill, pattern)


def check_stars(doing: str, pattern: str, others: Sequence[str]) -> None:
    """Raise unless each of `others` has as many stars as `pattern`.

    Raises:
        TreeError: Some patterns have more or fewer; the error names each of them.

    Examples:
        >>> check_stars("split_tensor", "layers.*.qkv", ["layers.*.q", "layers.*.k"])
    """
    wrong = [f"{other!r} has {stars(other)}" for other in others if stars(other) != stars(pattern)]
    if wrong:
        expected = f"{stars(pattern)} in each, as in {pattern!r}"
        fix = "Write as many stars in each pattern: what the stars of one match replaces the stars of the others."
        raise TreeError(
            error_text(f"{doing}: patterns differ in number of stars (*)", expected=expected, offenders=wrong, fix=fix)
        )


def match_keys(doing: str, patterns: Iterable[str], keys: Iterable[str]) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return the matched keys, each with the first pattern that matches and the texts of its stars.

    Args:
        doing: Name of the operation, for the error.
        patterns: Patterns in order of precedence.
        keys: Keys to match; those that no pattern matches are left out.

    Raises:
        TreeError: A pattern is unused: it matches no key, or only keys that earlier patterns match.

    Examples:
        >>> match_keys("rename", ["layers.*.bias", "layers.*.*"], ["layers.3.bias", "layers.3.weight", "step"])
        {'layers.3.bias': ('layers.*.bias', ('3',)), 'layers.3.weight': ('layers.*.*', ('3', 'weight'))}
    """
    # An unused pattern is most likely mistyped, and the intended keys would silently be left out.
    patterns = list(patterns)
    matches = {key: match for key in keys if (match := _first_match(patterns, key)) is not None}
    used = {pattern for pattern, _ in matches.values()}
    unused = [pattern for pattern in patterns if pattern not in used]
    if unused:
        fitting = {
            pattern: next((key for key in matches if match_key(pattern, key) is not None), None) for pattern in unused
        }
        lines = [
            f"{pattern!r} fits no key"
            if key is None
            else f"{pattern!r} fits {key!r}, but {matches[key][0]!r} comes first"
            for pattern, key in fitting.items()
        ]
        fix = "Correct or remove a pattern that fits no key; put a narrow pattern before a wide one."
        raise TreeError(error_text(f"{doing}: patterns are unused", offenders=lines, fix=fix))
    return matches


def _first_match(patterns: Sequence[str], key: str) -> tuple[str, tuple[str, ...]] | None:
    for pattern in patterns:
        parts = match_key(pattern, key)
        if parts is not None:
            return pattern, parts
    return None


def checked_keys(doing: str, keys: Sequence[str]) -> list[str]:
    """Return a copy of keys or patterns of keys as a list, after checking them.

    Raises:
        TreeError: There are none, one occurs twice, or the argument is a single string.

    Examples:
        >>> checked_keys("split", ["h.*.q", "h.*.k"])
        ['h.*.q', 'h.*.k']
    """
    many = not isinstance(keys, str | Mapping) and hasattr(keys, "__iter__")
    texts = list(keys) if many else []
    if not texts or not all(isinstance(key, str) for key in texts) or len(set(texts)) < len(texts):
        found, expected = repr(keys)[:200], "a non-empty list of different strings"
        raise TreeError(error_text(f"{doing}: unusable list of keys", found=found, expected=expected))
    return texts


def checked_patterns(doing: str, patterns: Iterable[str]) -> list[str]:
    """Return patterns of keys as a list without repetitions, after checking them; there may be none.

    Raises:
        KeyMismatch: The argument is a single string, or one of the patterns isn't a string.

    Examples:
        >>> checked_patterns("load: plain", ("mask.*", "mask.*"))
        ['mask.*']
    """
    texts = None if isinstance(patterns, str) or not isinstance(patterns, Iterable) else list(patterns)
    if texts is None or not all(isinstance(pattern, str) for pattern in texts):
        raise KeyMismatch(error_text(f"{doing}: the patterns are not a list of strings", found=repr(patterns)[:200]))
    return list(dict.fromkeys(texts))


def check_patterns_fit(doing: str, patterns: Iterable[str], keys: Collection[str]) -> None:
    """Raise unless each pattern fits a key: keys that a mistyped pattern should match would silently be left out.

    Raises:
        KeyMismatch: Some patterns fit no key; the error names each of them, with a guess.

    Examples:
        >>> check_patterns_fit("load: plain", ["mask.*"], ["mask.0", "w"])
    """
    nothing = [pattern for pattern in patterns if not any(map(key_matcher([pattern]), keys))]
    if nothing:
        fix = "Correct the pattern, or take it out. * is one part between dots, ** any number of them."
        lines = near_patterns(nothing, keys, widen=False)
        raise KeyMismatch(error_text(f"{doing}: patterns fit no key", offenders=lines, fix=fix))


# Suggestions for a mistyped name.

_KEYS = 10
_CLOSE = 10
_FEW_NAMES = 500
_NEIGHBOURS = 100
_LONGEST = 300
_LONGEST_DIFFERING = 4096


def near_names(keys: Iterable[str], names: Collection[str]) -> dict[str, str]:
    """Return the most similar name for each of the first ten keys; keys without a similar name are left out.

    Comparing a key with each of a million names would take minutes. Among many names, only those with a similar
    beginning or end are compared.

    Args:
        keys: Keys that aren't among the names.
        names: Existing names.

    Examples:
        >>> near_names(["decoder.wieght", "x"], ["decoder.weight", "decoder.bias"])
        {'decoder.wieght': 'decoder.weight'}
    """
    # Names come from files, and the time of a comparison grows with the product of both lengths. The limit guards
    # against names of megabytes.
    few = [key for key in islice(keys, _KEYS) if len(key) <= _LONGEST]
    if not few:
        return {}
    candidates = sorted(name for name in names if len(name) <= _LONGEST)
    # Names are sorted by their ends too: a typing error near the beginning would hide a name from a search by prefix.
    backwards = sorted(name[::-1] for name in candidates) if len(candidates) > _FEW_NAMES else []
    near = {key: get_close_matches(key, _to_compare(key, candidates, backwards), n=_CLOSE) for key in few}
    # A name with the same numbers as the key comes first, so that the guess is in the same layer.
    return {
        key: next((name for name in close if _numbers(name) == _numbers(key)), close[0])
        for key, close in near.items()
        if close
    }


def near_patterns(patterns: Iterable[str], keys: Collection[str], *, widen: bool = True) -> list[str]:
    """Return the lines of an error about patterns that fit no key: each in quotes, with a guess if there is one.

    A guess is a similar key; or the pattern with ``**`` for ``*``, or with existing parts (texts between dots) for
    unknown ones.

    Args:
        patterns: Patterns that fit no key.
        keys: Existing keys.
        widen: Whether a guess may have ``**``. It shouldn't if matched keys are dropped, since it may match far more
            keys.

    Examples:
        >>> for line in near_patterns(["*.weight", "**.wieght", "h.bais", "x"], ["h.0.weight", "h.bias"]):
        ...     print(line)
        '*.weight' (did you mean '**.weight'?)
        '**.wieght' (did you mean '**.weight'?)
        'h.bais' (did you mean 'h.bias'?)
        'x'
    """
    patterns = list(patterns)
    near = near_names(patterns, keys)
    parts = {part for key in keys if "*" in "".join(patterns) for part in key.split(".")}
    guesses = {text: _nearly(text, keys, parts, widen) or near.get(text) for text in patterns[:_KEYS]}
    return with_guesses(patterns, guesses)


def with_guesses(keys: Iterable[str], guesses: Mapping[str, str | None]) -> list[str]:
    """Return the lines of an error about unknown keys: each key in quotes, with its guess if there is one.

    Examples:
        >>> with_guesses(["wieght", "x"], {"wieght": "weight"})
        ["'wieght' (did you mean 'weight'?)", "'x'"]
    """
    return [repr(key) + (f" (did you mean {guesses[key]!r}?)" if guesses.get(key) else "") for key in keys]


def _nearly(pattern: str, keys: Collection[str], parts: Collection[str], widen: bool) -> str | None:
    """Return a similar pattern that fits a key, or None.

    Similar names in `parts` replace the pattern's unknown parts (texts between dots). If `widen` is set and this isn't
    enough, ``**`` replaces ``*``.
    """
    own = [part for part in pattern.split(".") if "*" not in part and part not in parts]
    near = near_names(own, parts) if "*" in pattern else {}
    guess = ".".join(near.get(part, part) for part in pattern.split("."))
    wider = [guess.replace("**", "*").replace("*", "**")] if widen else []
    return next((text for text in [guess, *wider] if "*" in text and any(map(key_matcher([text]), keys))), None)


def differing_prefix(keys: Sequence[str], names: Collection[str]) -> tuple[str, str] | None:
    """Return the single prefix by which several keys differ from existing names.

    Args:
        keys: Keys that aren't among the names.
        names: Existing names.

    Returns:
        ``(prefix to remove, prefix to add)``, one of them empty; None if there is no such prefix, or only one key.

    Examples:
        >>> differing_prefix(["module.w", "module.b"], ["w", "b", "step"])
        ('module.', '')
        >>> differing_prefix(["w", "b"], ["model.w", "model.b"])
        ('', 'model.')
    """
    longest = max(keys, key=len, default="")  # few names end with a long key
    # All suffixes of the longest key are tried; a limit guards against keys of megabytes.
    if len(keys) < 2 or not names or len(longest) > _LONGEST_DIFFERING:
        return None
    names = names if isinstance(names, (set, frozenset, dict)) else frozenset(names)
    # Candidates come from a single key, and are tried on the other keys: with millions of names, comparing each key
    # with each name would take minutes.
    too_much = (longest[:end] for end in range(1, len(longest)) if longest[end:] in names)
    prefix = next(
        (text for text in too_much if all(key.startswith(text) and key[len(text) :] in names for key in keys)), None
    )
    if prefix is not None:
        return prefix, ""
    lacking = sorted(name.removesuffix(longest) for name in names if name.endswith(longest))
    prefix = next((text for text in lacking if all(text + key in names for key in keys)), None)
    return None if prefix is None else ("", prefix)


def _numbers(name: str) -> list[str]:
    return [number.lstrip("0") for number in re.findall("[0-9]+", name)]


def _to_compare(key: str, candidates: Sequence[str], backwards: Sequence[str]) -> Sequence[str]:
    if len(candidates) <= _FEW_NAMES:
        return candidates
    return [*_neighbours(key, candidates), *(name[::-1] for name in _neighbours(key[::-1], backwards))]


def _neighbours(key: str, names: Sequence[str]) -> Sequence[str]:
    at = bisect_left(names, key)
    return names[max(0, at - _NEIGHBOURS) : at + _NEIGHBOURS]
