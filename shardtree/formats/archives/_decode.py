"""`decode_archive`: reads torch.save's archives, hostile ones included."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from functools import partial
from io import BytesIO
from pathlib import PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from types import SimpleNamespace
from typing import Any

import torch

from ...errors import CheckpointingException, CorruptCheckpoint, UnsafeFile, error_text
from ...kit import device_of, exactly, path_of
from ..pickles import Constructor, read_pickle
from ._classes import NAMED, constructors
from ._tensors import DTYPES, NO_VALUES, NUMPY, REBUILDERS, STORAGE_KINDS, loader
from ._zip import open_archive, slices

# These constructors make values other than tensors: containers, numbers, buffers, paths, namespaces, dtypes. Each
# checks the types of its arguments, since these come from the file and can be anything.

FACTORIES: tuple[type, ...] = (bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict)
"""Allowed factories of a defaultdict."""

PATHS: tuple[type[PurePath], ...] = (PurePosixPath, PureWindowsPath, PosixPath, WindowsPath)
"""Classes of paths that may be stored."""

_MOST = 2**63 - 1  # Positions and lengths have 64 bits.
_LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}


def _not_callable(name: str) -> Callable[..., Any]:
    def make(*args: Any) -> Any:
        raise TypeError(f"a call of {name} with {len(args)} arguments")

    return make


def _items(items: Any = ()) -> list[Any]:
    """Return the items that a call such as ``set([1, 2])`` passes; raise TypeError unless they are a list or tuple."""
    # Lists and tuples only: a range of a few bytes can have more items than memory.
    if type(items) not in (list, tuple):
        raise TypeError(f"a container made from a {type(items).__name__}")
    return list(items)


def _made_of(kind: Callable[[Any], Any], part: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a function that makes a container for a pickle; its only argument, the contents, may be left out.

    Args:
        kind: Type of the container.
        part: Function that checks the contents and returns the argument for `kind`.
    """
    return lambda contents=(): kind(part(contents))


def _keys(pairs: Any = ()) -> Iterable[Any]:
    return () if type(pairs) is dict else [key for key, _ in _items(pairs)]


def _dict(pairs: Any = ()) -> dict[Any, Any]:
    return dict(pairs) if type(pairs) is dict else dict(_items(pairs))


def _ignore_state(value: Any, state: Any) -> None:
    """Ignore the attributes of a dict, such as ``_metadata`` of a module's state dict."""


def _deque(items: Any = (), limit: Any = None) -> deque[Any]:
    if limit is not None and not len(_items(items)) <= exactly(int, limit) <= _MOST:
        raise ValueError(f"{len(items)} items in a deque of at most {limit}")
    return deque(_items(items), limit)


def _bytes(*args: Any) -> bytes:
    if not args:
        return b""
    text, encoding = args
    if exactly(str, encoding).replace("-", "") != "latin1":
        raise ValueError(f"bytes encoded as {encoding[:100]!r}")
    return exactly(str, text).encode("latin-1")


def _bytearray(*args: Any) -> bytearray:
    return bytearray(args[0] if len(args) == 1 and type(args[0]) is bytes else _bytes(*args))


def _range(start: Any, stop: Any, step: Any) -> range:
    return range(exactly(int, start), exactly(int, stop), exactly(int, step))


def _slice(start: Any, stop: Any, step: Any) -> slice:
    return slice(start, stop, step)


def _fill_namespace(value: Any, state: Any) -> None:
    vars(value).update({exactly(str, name): item for name, item in exactly(dict, state).items()})


def _fill_buffer(value: BytesIO, state: Any) -> None:
    data, position, attributes = state
    if not 0 <= exactly(int, position) <= _MOST or attributes:
        raise ValueError("a buffer with attributes, or with a position that does not fit 64 bits")
    value.write(exactly(bytes, data))
    value.seek(position)


def _size(lengths: Any = ()) -> torch.Size:
    return torch.Size([exactly(int, length) for length in _items(lengths)])


def _device(kind: Any, index: Any = None) -> torch.device:
    name = exactly(str, kind)
    return device_of(name if index is None else f"{name}:{exactly(int, index)}")


_BUILTINS: dict[str, Constructor] = {
    **{kind.__name__: Constructor(_not_callable(kind.__name__)) for kind in FACTORIES},
    "set": Constructor(_made_of(set, _items), keys=_items),
    "frozenset": Constructor(_made_of(frozenset, _items), keys=_items),
    "list": Constructor(_items),
    "tuple": Constructor(_made_of(tuple, _items)),
    "dict": Constructor(_dict, keys=_keys),
    "bytes": Constructor(_bytes),
    "bytearray": Constructor(_bytearray),
    "complex": Constructor(lambda real, imaginary: complex(exactly(float, real), exactly(float, imaginary))),
    "range": Constructor(_range),
    "slice": Constructor(_slice),
}
_FACTORY_OF = {_BUILTINS[kind.__name__]: kind for kind in FACTORIES}


def _defaultdict(factory: Any = None, pairs: Any = ()) -> defaultdict[Any, Any]:
    if factory is not None and (type(factory) is not Constructor or factory not in _FACTORY_OF):
        raise TypeError(f"a defaultdict whose factory is a {type(factory).__name__}")
    return defaultdict(None if factory is None else _FACTORY_OF[factory], _dict(pairs))


VALUES: dict[tuple[str, str], Any] = {
    **{("builtins", name): value for name, value in _BUILTINS.items()},
    ("_codecs", "encode"): Constructor(_bytes),
    ("collections", "OrderedDict"): Constructor(_made_of(OrderedDict, _dict), _ignore_state, _keys),
    ("collections", "defaultdict"): Constructor(_defaultdict, keys=lambda factory=None, pairs=(): _keys(pairs)),
    ("collections", "Counter"): Constructor(_made_of(Counter, _dict), keys=_keys),
    ("collections", "deque"): Constructor(_deque),
    ("argparse", "Namespace"): Constructor(Namespace, _fill_namespace),
    ("types", "SimpleNamespace"): Constructor(SimpleNamespace, _fill_namespace),
    ("_io", "BytesIO"): Constructor(BytesIO, _fill_buffer),
    ("io", "BytesIO"): Constructor(BytesIO, _fill_buffer),
    **{
        (module, kind.__name__): Constructor(partial(path_of, kind))
        for kind in PATHS
        for module in ("pathlib", "pathlib._local")
    },
    ("torch", "Size"): Constructor(_size),
    ("torch", "device"): Constructor(_device),
    ("torch.serialization", "_get_layout"): Constructor(lambda name: _LAYOUTS[exactly(str, name)]),
}

_CLASSES: dict[tuple[str, str], Any] = {**VALUES, **NAMED, **NUMPY, **REBUILDERS, **STORAGE_KINDS, **DTYPES}

_FIX = (
    "If it is an enum, a dataclass or a named tuple, pass the class in LoadOptions(types=(...)); otherwise "
    "only LoadOptions(allow_pickle=True) reads it, and runs any code in it: use it only if you trust the file."
)


def decode_archive(
    data: bytes | bytearray | memoryview, *, what: str, types: Iterable[type] = (), allow_pickle: bool = False
) -> Any:
    """Return the value that torch.save saved; the bytes may be untrusted.

    Nothing that the bytes name is imported. Members of Megatron-Core's enums and its `OptimizerConfig` become
    `Record`s, unless `types` has the class. Tensors and parameters become plain tensors on the CPU that need no
    gradient; they keep their strides and the memory that they share. Every record's CRC32 is checked.

    Args:
        data: Bytes of a whole archive. The value shares no memory with them.
        what: Description of the archive, for errors.
        types: Enums, dataclasses and named tuples that the value may contain; their `__init__` isn't run.
        allow_pickle: True to unpickle archives that can't be read otherwise; only for files whose writer you trust.

    Raises:
        CorruptCheckpoint: The bytes aren't such an archive, or were damaged.
        UnsafeFile: The archive names something that isn't data, and `allow_pickle` isn't given.
        UnsupportedValue: A class in `types` isn't what was stored, or a tensor is quantised, sparse or nested.

    Examples:
        >>> from shardtree.formats.archives import encode_archive
        >>> decode_archive(encode_archive({"step": 7, "rng": torch.arange(3)}), what="example")
        {'step': 7, 'rng': tensor([0, 1, 2])}
    """
    classes = {**_CLASSES, **constructors(types)}
    try:
        archive = open_archive(slices(data), memoryview(data).nbytes, what)
    except UnsafeFile:
        if not allow_pickle:
            raise
        return _unpickle(data, what)
    for name in archive.records:
        archive.checked_data(name)
    load = loader(archive.data)
    try:
        content = archive.data("data.pkl")
        return read_pickle(content, classes, what=what, persistent_load=load, fix=_FIX, helpers=NO_VALUES)
    except CheckpointingException:
        if not allow_pickle:
            raise
    return _unpickle(data, what)


def _unpickle(data: bytes | bytearray | memoryview, what: str) -> Any:
    try:
        return torch.load(BytesIO(data), map_location="cpu", weights_only=False)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise CorruptCheckpoint(error_text(f"{what}: the archive cannot be unpickled: {reason}")) from error
