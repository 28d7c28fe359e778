"""Archives of torch.save in data files: Megatron-Core's `torch_dist`, and what torch.distributed.checkpoint writes."""

import pickle

from ...kit import Fields, Storage, fields_of_backend


def recognize(storage: Storage) -> Fields | None:
    """Return the backends of a folder that torch.distributed.checkpoint wrote, None if it isn't one."""
    # With a common.pt it is a checkpoint of Megatron-Core without its last file, metadata.json: never finished.
    if storage.length(".metadata") is None or storage.length("common.pt") is not None:
        return None
    return fields_of_backend("dcp", 1)


def is_whole(storage: Storage, name: str) -> bool:
    """Return whether a pickle ends as pickles do."""
    with storage.open(name) as reader:
        return bytes(reader.read(max(0, reader.length - 1), reader.length)) == pickle.STOP
