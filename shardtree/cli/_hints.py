"""Errors' hints in the shell's words: where one names a Python keyword, it names the command's own option.

Errors are the library's, and say what to pass to a function: ``leave_out=['common']``. A command's options have the
names of the keywords that they are passed on as, so the option is found by its name: ``--leave-out common``.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Mapping

# A keyword with a value, maybe within the options that hold it: options=LoadOptions(allow_pickle=True).
_KEYWORD = re.compile(
    r"(?P<within>(?:\w*options=)?(?:Load|Save)Options\()?\b(?P<name>[a-z]\w*)="
    r"(?P<value>True|False|None|\[[^\[\]]*\]|\([^()]*\)|'[^']*'|\"[^\"]*\"|\d+|\.{3}|(?![\w(]))(?(within)\))"
)
_LEFT = re.compile(r"\b(?:Load|Save)Options\(|\b[Pp]ass [a-z]\w*=")
_NAME = re.compile(r"(?<![\w.'\"/])[a-z]+(?:_[a-z]+)+(?![\w('\"=.]\w*)")


def shell_words(text: str, options: Mapping[str, str]) -> str:
    """Return an error's text with a command's options in the place of Python's keywords.

    Args:
        text: of the error. Keywords that aren't options stay as they are.
        options: by the name of the keyword, how the option is typed: ``--name`` for a flag, else ``--name VALUE``.

    Examples:
        >>> options = {"allow_pickle": "--allow-pickle", "leave_out": "--leave-out PATTERN"}
        >>> shell_words("Pass options=LoadOptions(allow_pickle=True) if you trust it.", options)
        'Pass --allow-pickle if you trust it.'
        >>> shell_words("leave_out=['common'] converts without it", options)
        '--leave-out common converts without it'
    """
    text = _KEYWORD.sub(lambda found: _typed(found, options), text)
    # `partial_rename` is what --rename calls.
    named = {f"partial_{name}": typed for name, typed in options.items()} | {**options}
    text = _NAME.sub(lambda found: named.get(found[0], found[0]).partition(" ")[0], text)
    left = _LEFT.search(text) if options else None
    return text if left is None else f"{text}\n  {_in_python(left[0])}"


def _in_python(left: str) -> str:
    name = left.strip("(=").rpartition(" ")[2]
    return f"{name} is for a call from Python: this command has no option for it."


def _typed(found: re.Match[str], options: Mapping[str, str]) -> str:
    name, value = found["name"], found["value"]
    if value == "False" and f"no_{name}" in options:
        return options[f"no_{name}"]
    flag, _, metavar = options.get(name, "").partition(" ")
    is_switch = value in ("True", "False")
    # A value that the option doesn't take is another thing than this keyword's.
    if not flag or is_switch == bool(metavar) or value == "False":
        return found[0]
    if is_switch:
        return flag
    return " ".join(f"{flag} {shlex.quote(one)}" for one in _values(value)) or f"{flag} {metavar}"


def _values(value: str) -> list[str]:
    """Return the values of a literal as they are typed; none where it only stands for some."""
    try:
        read = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return []
    values = read if isinstance(read, list) else [read]
    # A pair is a format with its version, typed as zarr:3.
    typed = (":".join(map(str, one)) if isinstance(one, tuple) else str(one) for one in values)
    return [] if {None, ...} & set(values) else list(typed)
