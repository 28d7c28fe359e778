"""The names of a Hugging Face model's files, and which of them a folder is read by."""

from __future__ import annotations

import re

from ...storage import Storage
from .._values import Fields
from ..base import StrategyAction, register_default_strategy

BACKEND, VERSION = "huggingface", 1

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
SINGLE_FILE = f"model{SUFFIX}"
INDEX_FILE = f"model{INDEX_SUFFIX}"

_USUAL_STEMS = ("model", "diffusion_pytorch_model")
_ONE_OF_SEVERAL = re.compile(r"(.*-)?\d+-of-\d+\.safetensors", re.DOTALL)


@register_default_strategy(StrategyAction.RECOGNIZE, BACKEND, VERSION)
def recognize(storage: Storage) -> Fields | None:
    """Return what metadata.json would say of a model's folder, or of one safetensors file; None of anything else.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> recognize(MemoryStorage()) is None
        True
    """
    if find_weights(storage) is None:
        return None
    return {
        "sharded_backend": BACKEND,
        "sharded_backend_version": VERSION,
        "common_backend": BACKEND,
        "common_backend_version": VERSION,
    }


def find_weights(storage: Storage) -> str | None:
    """Return the name of the file that a model is read by, None where there is none or a choice.

    In this order, as transformers has it: the single file of a usual name, the index of a usual name, the only index,
    the only safetensors file. One of several files, as ``model-00001-of-00003.safetensors``, is no model by itself.

    Args:
        storage: a folder, or a single file, whose name in it is "".

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> storage = MemoryStorage()
        >>> storage.replace("adapter_model.safetensors", b"", durable=False)
        >>> find_weights(storage)
        'adapter_model.safetensors'
    """
    if storage.length("") is not None:
        return "" if storage.where().endswith(SUFFIX) else None
    names = storage.names()
    singles = [name for name in names if name.endswith(SUFFIX) and not _ONE_OF_SEVERAL.fullmatch(name)]
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    for stem in _USUAL_STEMS:
        for found in (singles, indexes):
            suffix = SUFFIX if found is singles else INDEX_SUFFIX
            if f"{stem}{suffix}" in found:
                return f"{stem}{suffix}"
    return next((found[0] for found in (indexes, singles) if len(found) == 1), None)


def file_name(number: int, count: int) -> str:
    """Return the name of one of several files, counted from 0.

    Examples:
        >>> file_name(0, 3)
        'model-00001-of-00003.safetensors'
    """
    return f"model-{number + 1:05d}-of-{count:05d}{SUFFIX}"


def draft_name(save_id: str, number: int, count: int) -> str:
    """Return the name that a file has until the commit; nobody takes that for a model, nor its folder.

    Examples:
        >>> draft_name("save-1", 0, 3)
        'save-1/model-00001-of-00003.safetensors'
    """
    return f"{save_id}/{file_name(number, count)}"
