"""Formats with torch.save's archives in data files: Megatron-Core's `torch_dist` and torch.distributed.checkpoint's."""

import pickle

from ...kit import Fields, Storage, fields_of_backend


def recognize(storage: Storage) -> Fields | None:
    """Return the fields of metadata.json for a folder that torch.distributed.checkpoint wrote; None for others."""
    # A folder with a common.pt is an unfinished checkpoint of Megatron-Core, which lacks its last file, metadata.json.
    if storage.length(".metadata") is None or storage.length("common.pt") is not None:
        return None
    return fields_of_backend("dcp", 1)


def is_whole(storage: Storage, name: str) -> bool:
    """Return whether a pickle was written to its end: its last byte must be the opcode STOP."""
    with storage.open(name) as reader:
        return bytes(reader.read(max(0, reader.length - 1), reader.length)) == pickle.STOP
