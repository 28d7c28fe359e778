"""Files of a ZeRO checkpoint: the folder of the tag, and each rank's file in it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ...errors import CheckpointingException, CorruptCheckpoint, UnsupportedValue, error_text, missing_numbers
from ...kit import Fields, Storage, fields_of_backend, is_folder

ZERO, UNIVERSAL = ("deepspeed", 1), ("universal", 1)

LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"

STATES = "zero"
"""Folder of a Universal Checkpoint that has a folder for each parameter."""

# `pp_rank` is the data-parallel rank, for historical reasons. Leading zeros aren't matched, as a rank has one file.
_DATA, _TENSOR = r"(0|[1-9]\d{0,8})", r"(\d{2}|[1-9]\d{2,8})"
_MODEL = re.compile(rf"(?:zero_pp_rank_{_DATA}_)?mp_rank_{_TENSOR}_model_states\.pt", re.ASCII)
_OPTIMIZER = re.compile(rf"(bf16_|fp16_|)zero_pp_rank_{_DATA}_mp_rank_{_TENSOR}_optim_states\.pt", re.ASCII)
_OTHERS = (
    (re.compile(r"layer_\d+-model_\d+-model_states\.pt"), "a layer of a pipeline"),
    (re.compile(r"(layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt"), "an expert"),
    (re.compile(r"(bf16_|fp16_|)expp_rank_\d+_mp_rank_\d+_optim_states\.pt"), "optimizer states of experts"),
)
_TAG_BYTES = 4096
"""Upper bound of a tag's length: a crafted file mustn't fill the memory."""


@dataclass(frozen=True, slots=True)
class ZeroFiles:
    """The files of a checkpoint.

    Attributes:
        folder: Folder of the files, with a slash at its end; empty for the checkpoint's folder itself.
        models: Model files by data-parallel rank; a single one for ZeRO-1 and 2.
        optimizers: Optimizer files by data-parallel rank.
    """

    folder: str
    models: tuple[str, ...]
    optimizers: tuple[str, ...]


def recognize(storage: Storage) -> Fields | None:
    """Return the fields that metadata.json would have for a ZeRO checkpoint; None for any other folder.

    The folder is the one that DeepSpeed saved to, or the folder of a tag in it.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> recognize(MemoryStorage()) is None
        True
    """
    folder = tag_folder(storage)
    names = () if folder is None else storage.names(folder.rstrip("/"))
    if not any(map(_is_model, names)) or STATES in names:
        return None
    return fields_of_backend(*ZERO)


def recognize_universal(storage: Storage) -> Fields | None:
    """Return the fields that metadata.json would have for a Universal Checkpoint; None for any other folder.

    The folder may also be one whose file `latest` or `latest_universal` names a Universal Checkpoint.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> recognize_universal(MemoryStorage()) is None
        True
    """
    return None if universal_folder(storage) is None else fields_of_backend(*UNIVERSAL)


def universal_folder(storage: Storage) -> str | None:
    """Return the folder of a Universal Checkpoint in a storage, with a slash at its end; None if there is none.

    The result is "" if the storage itself is that folder.
    """
    for latest in (LATEST, LATEST_UNIVERSAL):
        folder = tag_folder(storage, latest)
        if folder is None:
            continue
        names = storage.names(folder.rstrip("/"))
        if STATES in names and any(name.endswith("_model_states.pt") for name in names):
            return folder
    return None


def _is_model(name: str) -> bool:
    return _MODEL.fullmatch(name) is not None or any(pattern.fullmatch(name) for pattern, _ in _OTHERS)


def tag_folder(storage: Storage, latest: str = LATEST) -> str | None:
    """Return the folder that the file `latest` names, with a slash at its end; "" if there is no such file.

    The result is None if the storage is a file itself, or if the named folder does not exist.
    """
    if storage.length("") is not None:
        return None
    length = storage.length(latest)
    if length is None:
        return ""
    if length > _TAG_BYTES:
        return None
    try:
        tag = storage.read(latest).decode("utf-8").strip()
    except UnicodeDecodeError:
        return None
    return f"{tag}/" if _is_in_folder(storage, tag) else None


def _is_in_folder(storage: Storage, tag: str) -> bool:
    try:
        return bool(tag) and is_folder(storage, tag)
    except CheckpointingException:  # The name leads out of the folder.
        return False


def zero_files(storage: Storage, folder: str) -> ZeroFiles:
    """Return a checkpoint's files, in the order of data-parallel ranks.

    Raises:
        UnsupportedValue: The model is also split by tensor, pipeline or expert parallelism, and no file says how to
            join the parts.
        CorruptCheckpoint: The folder has files of two saves, or a rank's file is missing.
    """
    names = storage.names(folder.rstrip("/"))
    where = storage.where(folder.rstrip("/"))
    _check_joinable(names, where)
    models = {int(match[1] or 0): name for name in names if (match := _MODEL.fullmatch(name))}
    if not models:
        fix = f"Copy every rank's file, and {LATEST!r}, which names their folder."
        raise CorruptCheckpoint(error_text(f"open: {where!r} has no model_states files", fix=fix))
    prefixes: dict[str, dict[int, str]] = {}
    for name in names:
        if match := _OPTIMIZER.fullmatch(name):
            prefixes.setdefault(match[1], {})[int(match[2])] = name
    two = [min(ranks.values()) for ranks in prefixes.values()] if len(prefixes) > 1 else []
    if "mp_rank_00_model_states.pt" in names and any(name.startswith("zero_pp_rank") for name in models.values()):
        two = ["mp_rank_00_model_states.pt", next(name for name in models.values() if name.startswith("zero_pp_rank"))]
    if two:
        fix = "Move the files of one save away; nothing in them says which are current."
        pair = " beside ".join(two)
        raise CorruptCheckpoint(error_text(f"open: {where!r} has files of two saves", found=pair, fix=fix))
    optimizers = next(iter(prefixes.values()), {})
    for kind, ranks in (("model_states", models), ("optim_states", optimizers)):
        size = max(ranks, default=-1) + 1
        if size > len(ranks):
            missing, count = map(str, missing_numbers(ranks, len(ranks), size)), size - len(ranks)
            heading = f"open: {where!r} lacks the {kind} files of data-parallel ranks"
            raise CorruptCheckpoint(error_text(heading, offenders=missing, count=count, fix="Copy every rank's file."))
    in_order = (tuple(folder + ranks[rank] for rank in sorted(ranks)) for ranks in (models, optimizers))
    return ZeroFiles(folder, *in_order)


def _check_joinable(names: Iterable[str], where: str) -> None:
    matches = [match for name in names if (match := _MODEL.fullmatch(name) or _OPTIMIZER.fullmatch(name))]
    tensor_parallel = [match[0] for match in matches if int(match[match.re.groups]) > 0]
    wrong = [f"{tensor_parallel[0]!r}: a slice of tensor parallelism"] if tensor_parallel else []
    for pattern, what in _OTHERS:
        wrong += [f"{name!r}: {what}" for name in names if pattern.fullmatch(name)][:1]
    if wrong:
        fix = (
            "The files do not say how they join: convert them with DeepSpeed's ds_to_universal, or load with DeepSpeed."
        )
        raise UnsupportedValue(error_text(f"open: the files in {where!r} cannot be joined", offenders=wrong, fix=fix))


def check_count(storage: Storage, folder: str, kind: str, count: int, expected: int, by: str) -> None:
    """Raise unless there is one file for each data-parallel rank of the save.

    Args:
        storage: Storage of the checkpoint.
        folder: Folder of the files in the storage.
        kind: Kind of files, for the error.
        count: Number of files.
        expected: Number of ranks that saved.
        by: Source of the expected number, for the error.

    Raises:
        CorruptCheckpoint: There are fewer files, or more.
    """
    if count == expected:
        return
    fewer = "Copy every rank's file: each holds parts of tensors that no other file has."
    fix = fewer if count < expected else "Move away the files of an older save with more ranks."
    heading = f"open: {storage.where(folder.rstrip('/'))!r} does not have one {kind} file for each rank"
    raise CorruptCheckpoint(error_text(heading, found=f"{count} files", expected=f"{expected}, as {by} says", fix=fix))
