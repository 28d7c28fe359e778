"""Values of files that may be untrusted, read by type: any other type is an error that names the file and the place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...codec import element_count
from ...codec.archives import StoredTensor
from ...errors import CorruptCheckpoint, TreePath, error_text, render_path


@dataclass(frozen=True, slots=True, eq=False)
class ValueAt:
    """A value that a file holds, and where. Each method returns what it must be, or raises CorruptCheckpoint.

    Attributes:
        value: anything.
        file: for messages.
        path: in what was saved.

    Examples:
        >>> ValueAt({"groups": [{"lr": "high"}]}, "optim.pt").member("groups").items()[0].member("lr").of(int, float)
        Traceback (most recent call last):
        ...
        shardtree.errors.CorruptCheckpoint: open: 'optim.pt' isn't as the program of its format writes it
          found saved['groups'][0]['lr'] is 'high', a str, expected an int or a float
          It was damaged, or made by another program.
    """

    value: Any
    file: str
    path: TreePath = ()

    def of(self, *kinds: type[Any]) -> Any:
        """Return the value, of one of these types; a bool is no int."""
        if not isinstance(self.value, kinds) or (type(self.value) is bool and bool not in kinds):
            raise self._wrong(_one_of(kinds))
        return self.value

    def count(self) -> int:
        """Return an int that isn't negative, and that 64 bits hold."""
        found: int = self.of(int)
        if not 0 <= found < 2**63:
            raise self._wrong("0 or more, in 64 bits")
        return found

    def shape(self) -> tuple[int, ...]:
        """Return the lengths that a list or a tuple has."""
        lengths = tuple(item.count() for item in self.items())
        try:
            element_count(lengths)
        except ValueError:
            raise self._wrong("a shape whose elements 64 bits can count") from None
        return lengths

    def items(self) -> list[ValueAt]:
        """Return what a list or a tuple has."""
        return [ValueAt(item, self.file, (*self.path, at)) for at, item in enumerate(self.of(list, tuple))]

    def member(self, name: str, default: Any = None) -> ValueAt:
        """Return what a dict has under a name; the default where that is None or isn't there."""
        found = self.of(dict).get(name)
        return ValueAt(default if found is None else found, self.file, (*self.path, name))

    def members(self, *keys: type[Any]) -> dict[Any, ValueAt]:
        """Return what a dict has, whose keys are of these types; those that are numbers count something."""
        found = self.of(dict)
        for key in found:
            if not isinstance(key, keys):
                raise self._wrong(f"keys that are each {_one_of(keys)}, not {_shown(key)}")
            if isinstance(key, int) and not 0 <= key < 2**63:
                raise self._wrong(f"keys of 0 or more, in 64 bits, not {_shown(key)}")
        return {key: ValueAt(value, self.file, (*self.path, key)) for key, value in found.items()}

    def _wrong(self, expected: str) -> CorruptCheckpoint:
        what = f"open: {self.file!r} isn't as the program of its format writes it"
        found = f"{render_path(self.path, 'saved')} is {_shown(self.value)}"
        fix = "It was damaged, or made by another program."
        return CorruptCheckpoint(error_text(what, found=found, expected=expected, fix=fix))


def _one_of(kinds: tuple[type[Any], ...]) -> str:
    return " or ".join(map(_a_type, kinds))


def _a_type(kind: type[Any]) -> str:
    if kind in (StoredTensor, type(None)):
        return "a tensor" if kind is StoredTensor else "nothing"
    return f"{'an' if kind.__name__[0] in 'aeiou' else 'a'} {kind.__name__}"


def _shown(value: Any) -> str:
    # Python refuses to show an int of very many digits.
    is_shown = isinstance(value, (str, float)) or (isinstance(value, int) and value.bit_length() < 128)
    return f"{repr(value)[:100]}, {_a_type(type(value))}" if is_shown else _a_type(type(value))
