"""A `.metadata` that names classes nobody knows, where its writer is trusted: those are imported, the others aren't."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any

from ...codec import Constructor, Stub
from ...errors import CorruptCheckpoint, error_text


def read_trusted(data: bytes, classes: Mapping[tuple[str, str], Any], *, what: str) -> Any:
    """Return the value of a pickle, which may run any code.

    Args:
        data: the pickle.
        classes: what names stand for that aren't imported.
        what: the file, for messages.

    Raises:
        CorruptCheckpoint: it isn't a pickle, or what it runs fails.
    """
    try:
        return _Unpickler(io.BytesIO(data), classes).load()
    except Exception as error:
        found = f"{type(error).__name__}: {error}"[:300]
        raise CorruptCheckpoint(error_text(f"{what}: not a pickle that can be read", found=found)) from error


class _Unpickler(pickle.Unpickler):
    """Makes stubs of the classes that are known, so that whoever looks at them finds what the safe reader gives."""

    def __init__(self, file: io.BytesIO, classes: Mapping[tuple[str, str], Any]) -> None:
        super().__init__(file)
        self.classes = classes

    def find_class(self, module: str, name: str) -> Any:
        """Return what a name stands for."""
        try:
            known = self.classes[module, name]
        except KeyError:
            return super().find_class(module, name)
        if not isinstance(known, Constructor):
            return known
        return known.make if known.build is None else type(name, (_Known,), {"made": known})


class _Known(Stub):
    """A stub as a class, which is what `pickle` makes instances of."""

    __slots__ = ()
    made: Constructor

    def __new__(cls, *arguments: Any) -> _Known:
        self = super().__new__(cls)
        stub = cls.made.make(*arguments)
        self.type_name, self.args, self.state = stub.type_name, stub.args, stub.state
        return self

    def __init__(self, *arguments: Any) -> None:
        """Leave it as it was made."""

    def __setstate__(self, state: Any) -> None:
        self.state = state
