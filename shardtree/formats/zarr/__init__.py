"""Zarr: Megatron-Core's old checkpoints (version 1, read only), and zarr v3 arrays of any program (version 3)."""

from ...kit import Fields, Storage, fields_of_backend, parse_json


def recognize(storage: Storage) -> Fields | None:
    """Return the fields that name the backend, for another program's folder of zarr arrays; None for anything else."""
    # A group of our own without metadata.json is an unfinished save, and must not open as another program's.
    if storage.length(".zgroup") is None:
        if storage.length("zarr.json") is None:
            return None
        node = parse_json(storage.read("zarr.json"), storage.where("zarr.json"))
        attributes = node.get("attributes") if isinstance(node, dict) else None
        is_group = isinstance(node, dict) and node.get("node_type") == "group"
        if not is_group or (isinstance(attributes, dict) and "shardtree" in attributes):
            return None
    return fields_of_backend("zarr", 3)


def is_whole(storage: Storage, name: str) -> bool:
    """Return True if the metadata file of a group or an array is complete JSON; raise if it isn't.

    Raises:
        CorruptCheckpoint: The file isn't JSON.
    """
    with storage.open(name) as reader:
        parse_json(reader.read(), name)
        return reader.length > 0
