"""What a place that is no checkpoint seems to be, by the names in it: errors say so."""

from __future__ import annotations

import re
from collections.abc import Iterable

_PICKLES = r".*\.(bin|pt|pth|ckpt|pkl)(\.index\.json)?"

_CLUES = (
    (
        r"latest_checkpointed_iteration\.txt",
        "a folder of Megatron-LM's that holds checkpoints",
        "Name one of the folders in it, such as iter_0000042.",
    ),
    (
        r"mp_rank_\d+(_\d+)*",
        "Megatron-LM's checkpoint of before torch_dist: a pickle for each rank",
        "Convert it to torch_dist with Megatron-LM.",
    ),
    (
        r"__\d+\.metadata",
        "torch.distributed.checkpoint's, saved with use_collectives=False: an index for each rank, none of all",
        "Load it with as many ranks there, and save it with collectives.",
    ),
    (
        r".*\.distcp",
        "data files of torch.distributed.checkpoint or Megatron-Core; their save wasn't finished, or a file got lost",
        "Load another checkpoint; .metadata and, of Megatron-Core's, metadata.json have to be there.",
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
    (
        _PICKLES,
        "pickled weights, which can run code when they are loaded and aren't read",
        "Save them as safetensors: save_pretrained(..., safe_serialization=True), or safetensors.torch.save_file.",
    ),
)


def clue(names: Iterable[str]) -> tuple[str, str] | None:
    """Return what a folder seems to be and what to do about it, None where its names tell nothing.

    Args:
        names: in the folder; of a file, its own.

    Examples:
        >>> clue(["config.json", "pytorch_model.bin"])[0]
        "pickled weights, which can run code when they are loaded and aren't read"
        >>> clue(["notes.txt"]) is None
        True
    """
    known = list(names)
    for pattern, found, fix in _CLUES:
        if any(re.fullmatch(pattern, name, re.DOTALL) for name in known):
            return found, fix
    return None
