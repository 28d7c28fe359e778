"""What a place is that holds no finished checkpoint: a run, a folder of checkpoints, an unfinished one, a wrong name.

Only an error is made of it: a guess from names on disk, never a choice of what is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice

from ..errors import CheckpointingException, NotACheckpoint, error_text
from ..storage import LocalStorage, Storage, folder_in, is_folder
from ..strategies import Fields, is_save_folder
from ..trees import near_names

FieldsAt = Callable[[Storage], Fields | None]
"""Returns the fields of the checkpoint in a place, None if there is none."""

_PICKLES = r".*\.(bin|pt|pth|ckpt|pkl)(\.index\.json)?"
_SAFER = (
    "Of weights, save_pretrained(..., safe_serialization=True) makes safetensors; whatever you trust, torch.load reads,"
    " and `save` stores all of it."
)

_CLUES = (
    (
        r"latest_checkpointed_iteration\.txt",
        "a run of Megatron-LM's or verl's, and no step in it that can be opened",
        "Name the folder of a step, such as iter_0000042: the error says what it lacks.",
    ),
    (
        r"mp_rank_\d+(_\d+)*",
        "a checkpoint of Megatron-LM from before torch_dist: a pickle for each rank",
        "Convert it to torch_dist with Megatron-LM.",
    ),
    (
        r"__\d+\.metadata",
        "a checkpoint of torch.distributed.checkpoint, saved with use_collectives=False: an index for each rank only",
        "Load it with as many ranks there, and save it with collectives.",
    ),
    (
        r".*\.distcp",
        "data files of torch.distributed.checkpoint or Megatron-Core; their save wasn't finished, or a file got lost",
        "Load another checkpoint; .metadata and, of Megatron-Core's, metadata.json have to be there.",
    ),
    (
        r"common\.pt",
        "a save of Megatron-Core's that wasn't finished: its common state is there, and its tensors aren't",
        "Load another checkpoint, such as the step before.",
    ),
    (
        r"shard-\d+-.*\.safetensors",
        "the ranks' parts of a model, as torch.distributed.checkpoint's HuggingFaceStorageWriter saves them",
        "Save with enable_consolidation=True, or consolidate them with torch.",
    ),
    (
        r".*\.safetensors",
        "several safetensors files, and no index that says which make up the model",
        "Name one of the files, or fetch the index too.",
    ),
    (r"\.zarray|zarr\.json", "a zarr array, or a save of shardtree's that wasn't finished", "Name the array's group."),
    (_PICKLES, "pickled weights or states, which can run code when they are loaded and aren't read", _SAFER),
)
_CONVERSION = re.compile(r"\.convert-[0-9a-f]+")
_UNFINISHED = (
    "a conversion that was interrupted, or is still running",
    "Run the same conversion again: it goes on from what is there.",
)
_SAVE = ("a save that was interrupted, or is still running", "Load another checkpoint, or wait until it is finished.")


def not_a_checkpoint(storage: Storage, fields_at: FieldsAt) -> NotACheckpoint:
    """Return the error for a place that holds no finished checkpoint: what it is instead, and what to name.

    Args:
        storage: the place.
        fields_at: finds the checkpoints in its folders.
    """
    what = f"open: {storage.where()!r} is not a checkpoint"
    fix = "Name the folder that a save was given; an unfinished save leaves no metadata.json."
    if is_folder(storage):
        names = storage.names()
        if not any(map(_CONVERSION.fullmatch, names)) and (inside := list(checkpoints_in(storage, fields_at))):
            return _of_several(storage, what, inside)
        state = "a folder without metadata.json, in no format that is recognised"
    elif storage.length("") is not None:
        state, names = "a file in no format that is recognised", (storage.where().rpartition("/")[2],)
    else:
        near = _similar_path(storage)
        return NotACheckpoint(error_text(what, found="no such folder", fix=f"Did you mean {near!r}?" if near else fix))
    if (hint := clue(names)) is not None:
        state, fix = f"{state.partition(',')[0]}: {hint[0]}", hint[1]
    elif steps := [name for name in names if step_prefix(name) is not None and is_folder(storage, name)]:
        state, fix = "a run without a finished step", f"Open {steps[-1]!r} in it: the error says what it lacks."
    return NotACheckpoint(error_text(what, found=state, fix=fix))


def clue(names: Iterable[str]) -> tuple[str, str] | None:
    """Return what a folder seems to be and what to do about it, None if no name in it is known.

    Args:
        names: in the folder; of a file, its own.

    Examples:
        >>> clue(["config.json", "pytorch_model.bin"])[0]
        "pickled weights or states, which can run code when they are loaded and aren't read"
        >>> clue(["notes.txt"]) is None
        True
    """
    names = list(names)
    if any(map(_CONVERSION.fullmatch, names)):
        return _UNFINISHED
    if any(map(is_save_folder, names)):
        return _SAVE
    for pattern, state, fix in _CLUES:
        if any(re.fullmatch(pattern, name, re.DOTALL) for name in names):
            return state, fix
    return None


# Checkpoints in the folders of a place

_STEP = re.compile(r"([^0-9.][^0-9]*|)([0-9]{1,18})")
_PART = re.compile(r"(pytorch_model_fsdp|pytorch_model|optimizer)_[0-9]+")
"""Parts of one checkpoint, as accelerate names them: the number is that of a model, not of a step."""

_MOST_FOLDERS = 100  # that are looked into: each takes some reads


def step_prefix(folder: str) -> str | None:
    """Return what stands before the number in the name of a step's folder; None for another name.

    Examples:
        >>> step_prefix("iter_0000100"), step_prefix("100"), step_prefix("optimizer_0"), step_prefix("weights")
        ('iter_', '', None, None)
    """
    match = _STEP.fullmatch(folder)
    return None if match is None or _PART.fullmatch(folder) else match[1]


def checkpoints_in(storage: Storage, fields_at: FieldsAt, depth: int = 2) -> Iterator[tuple[str, Fields]]:
    """Yield the names and fields of the checkpoints in a folder's folders; of steps, of the newest that has any.

    Args:
        storage: the folder.
        fields_at: finds a checkpoint.
        depth: how many folders deep they may lie: a step of verl's has one for each model.
    """
    prefixes: set[str] = set()
    names = [name for name in storage.names() if not name.startswith(".") and not is_save_folder(name)]
    # Before it is asked what is a folder: a dataset may lie there, of very many files.
    for name in islice((name for name in sorted(names, key=_newest_first) if is_folder(storage, name)), _MOST_FOLDERS):
        prefix = step_prefix(name)
        if prefix is not None and prefix in prefixes:
            continue
        inside = list[tuple[str, Fields]]()
        with suppress(CheckpointingException):  # a folder that can't be read, or a damaged checkpoint: not this error's
            folder = folder_in(storage, name)
            fields = fields_at(folder)
            if fields is not None:
                inside = [("", fields)]
            elif depth > 1:
                inside = list(checkpoints_in(folder, fields_at, depth - 1))
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
        what, fix = f"{what}, but a run; its newest finished step is, or holds", "Name that, or an older one."
        return NotACheckpoint(error_text(what, offenders=lines, fix=fix))
    return NotACheckpoint(error_text(f"{what}, but holds", offenders=lines, fix="Name what you mean of these."))


def _similar_path(storage: Storage) -> str | None:
    """Return the local path that a missing one was most likely meant as, None if nothing there has a similar name."""
    if not isinstance(storage, LocalStorage):
        return None
    above, missing = storage.root.rstrip("/"), list[str]()
    with suppress(CheckpointingException):
        while above and not LocalStorage(above).is_folder():
            above, _, name = above.rpartition("/")
            missing.insert(0, name)
        near = near_names(missing[:1], LocalStorage(above or "/").names())
        candidates = [f"{above}/{one}" for one in near.values()]
        whole = ["/".join((one, *missing[1:])) for one in candidates]
        return next((one for one in (*whole, *candidates) if one in candidates or LocalStorage(one).is_folder()), None)
    return None
