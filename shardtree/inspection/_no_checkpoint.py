"""The likely kind of a path that isn't a checkpoint: a run, several checkpoints, an unfinished save, a misspelt path.

The result is only an error's text, guessed from file names and a file's first bytes; it never decides what is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice

from ..core.trees import near_names
from ..errors import CheckpointingException, NotACheckpoint, error_text
from ..shell.storage import LocalStorage, Storage, folder_in, is_folder
from ..shell.table import Fields, is_save_folder
from ._clues import HEAD_BYTES, clue, clue_of_bytes, is_conversion, others_clue

FieldsAt = Callable[[Storage], Fields | None]
"""A function that returns the fields of the checkpoint in a folder; None if there is none."""


def not_a_checkpoint(storage: Storage, fields_at: FieldsAt) -> NotACheckpoint:
    """Return the error for a path without a finished checkpoint: its likely kind, and the path to use instead.

    Args:
        storage: Storage of the folder or file.
        fields_at: Function that returns the content of metadata.json for the checkpoint in a folder, or None if the
            folder isn't a checkpoint.
    """
    heading = f"open: {storage.where()!r} is not a checkpoint"
    fix = "Name the folder that was passed to a save; an unfinished save leaves no metadata.json."
    if is_folder(storage):
        names = storage.names()
        # The names are classified once: it takes a request to find out whether a name is a folder's.
        folders = [] if any(map(is_conversion, names)) else list(islice(_folders(storage, names), _MOST_FOLDERS))
        if inside := list(_checkpoints_in(storage, folders, fields_at)):
            return _of_several(storage, heading, inside)
        state, fix = _of_folder(storage, names, folders, fix)
    elif storage.length("") is not None:
        state, fix = _of_file(storage, fix)
    else:
        near = _similar_path(storage)
        state, fix = "no such folder", f"Did you mean {near!r}?" if near else fix
    return NotACheckpoint(error_text(heading, found=state, fix=fix))


def _of_folder(storage: Storage, names: Iterable[str], folders: Iterable[str], fix: str) -> tuple[str, str]:
    """Return the likely kind of a folder that isn't a checkpoint, and what to do: `fix` for an unknown kind."""
    if (hint := clue(names)) is not None:
        return f"a folder without metadata.json: {hint[0]}", hint[1]
    steps = [name for name in folders if step_prefix(name) is not None]
    if (below := _others_below(storage, folders)) is not None:
        name, (state, what_reads_it) = below
        return f"{'a run' if steps else 'a folder'} of another program; {name!r} in it is {state}", what_reads_it
    if steps:
        return "a run without a finished step", f"Open {steps[0]!r} in it: the error says what it lacks."
    return "a folder without metadata.json, in no format that is recognised", fix


def _of_file(storage: Storage, fix: str) -> tuple[str, str]:
    """Return the likely kind of a file that isn't a checkpoint, and what to do: `fix` for an unknown kind."""
    hint = clue([storage.where().rpartition("/")[2]])
    if hint is None:
        with suppress(CheckpointingException), storage.open("") as reader:
            hint = clue_of_bytes(bytes(reader.read(0, min(HEAD_BYTES, reader.length))))
    return ("a file in no format that is recognised", fix) if hint is None else (f"a file: {hint[0]}", hint[1])


_MOST_LOOKS = 3  # per folder: a run's steps are alike, and a step of Orbax's has few items


def _others_below(storage: Storage, folders: Iterable[str], depth: int = 2) -> tuple[str, tuple[str, str]] | None:
    """Return the first subfolder that looks like another program's checkpoint; None if there is none.

    Args:
        storage: The folder.
        folders: Names of its subfolders.
        depth: Number of levels of subfolders to look into.

    Returns:
        ``(path, (kind, remedy))``: the subfolder's path in the folder, its likely kind, and what to do with it.
    """
    with suppress(CheckpointingException):
        for name in islice(folders, _MOST_LOOKS):
            folder = folder_in(storage, name)
            names = folder.names()
            if (hint := others_clue(names)) is not None:
                return name, hint
            if depth > 1 and (below := _others_below(folder, _folders(folder, names), depth - 1)) is not None:
                return f"{name}/{below[0]}", below[1]
    return None


def _folders(storage: Storage, names: Iterable[str]) -> Iterator[str]:
    """Yield the names that are subfolders, newest steps first, except hidden folders and unfinished saves."""
    names = [name for name in names if not name.startswith(".") and not is_save_folder(name)]
    # Names are sorted before they are classified: a dataset of very many files may lie there.
    return (name for name in sorted(names, key=_newest_first) if is_folder(storage, name))


# Checkpoints in the folders of a place

_STEP = re.compile(r"([^0-9.][^0-9]*|)([0-9]{1,18})")
_PART = re.compile(r"(pytorch_model_fsdp|pytorch_model|optimizer)_[0-9]+")
"""Parts of one checkpoint, as accelerate names them: the number is that of a model, not of a step."""

_MOST_FOLDERS = 100  # to look into: each takes some reads


def step_prefix(folder: str) -> str | None:
    """Return the part of a step folder's name before the step's number; None if the name isn't a step folder's.

    Examples:
        >>> step_prefix("iter_0000100"), step_prefix("100"), step_prefix("optimizer_0"), step_prefix("weights")
        ('iter_', '', None, None)
    """
    match = _STEP.fullmatch(folder)
    return None if match is None or _PART.fullmatch(folder) else match[1]


def _checkpoints_in(
    storage: Storage, folders: Iterable[str], fields_at: FieldsAt, depth: int = 2
) -> Iterator[tuple[str, Fields]]:
    """Yield the path and fields of each checkpoint in the subfolders of a folder; for a run, only its newest step's.

    Args:
        storage: The folder.
        folders: Names of its subfolders, newest steps first.
        fields_at: Function that returns the fields of the checkpoint in a folder, or None.
        depth: Number of levels of subfolders to look into: a step of verl has a subfolder for each model.
    """
    prefixes: set[str] = set()
    for name in islice(folders, _MOST_FOLDERS):
        prefix = step_prefix(name)
        if prefix is not None and prefix in prefixes:
            continue
        inside = list[tuple[str, Fields]]()
        with suppress(CheckpointingException):  # unreadable folders and damaged checkpoints aren't suggested
            folder = folder_in(storage, name)
            fields = fields_at(folder)
            if fields is not None:
                inside = [("", fields)]
            elif depth > 1:
                inside = list(_checkpoints_in(folder, _folders(folder, folder.names()), fields_at, depth - 1))
        if inside and prefix is not None:
            prefixes.add(prefix)
        yield from ((f"{name}/{inner}".rstrip("/"), fields) for inner, fields in inside)


def _newest_first(folder: str) -> tuple[str, int, str]:
    match = _STEP.fullmatch(folder)
    return (folder, 0, folder) if match is None else (match[1], -int(match[2]), folder)


def _of_several(storage: Storage, what: str, inside: list[tuple[str, Fields]]) -> NotACheckpoint:
    lines = [
        f"{storage.where(name)!r} ({fields.get('sharded_backend')} {fields.get('sharded_backend_version')})"
        for name, fields in inside
    ]
    if any(step_prefix(name.partition("/")[0]) is not None for name, _ in inside):
        what, fix = f"{what}, but a run, whose newest finished step is:", "Pass that step, or an older one."
        return NotACheckpoint(error_text(what, offenders=lines, fix=fix))
    return NotACheckpoint(error_text(f"{what}, but holds several", offenders=lines, fix="Pass one of them."))


def _similar_path(storage: Storage) -> str | None:
    """Return an existing path similar to the missing path of a local storage; None if there is none."""
    if not isinstance(storage, LocalStorage):
        return None
    above, missing = storage.root.rstrip("/"), list[str]()
    with suppress(CheckpointingException):
        while above and not LocalStorage(above).is_folder():
            above, _, name = above.rpartition("/")
            missing.insert(0, name)
        near = near_names(missing[:1], LocalStorage(above or "/").names())
        candidates = [f"{above}/{candidate}" for candidate in near.values()]
        whole = ["/".join((candidate, *missing[1:])) for candidate in candidates]
        return next(
            (
                candidate
                for candidate in (*whole, *candidates)
                if candidate in candidates or LocalStorage(candidate).is_folder()
            ),
            None,
        )
    return None
