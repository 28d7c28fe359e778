"""Zarr: Megatron-Core's old checkpoints (version 1, read only), and zarr v3 arrays, ours and others' (version 3)."""

from ...kit import Fields, Storage, fields_of_backend, parse_json


def recognize(storage: Storage) -> Fields | None:
    """Return the backends of a folder of zarr arrays that another program wrote, None if it isn't one."""
    # A group of ours without metadata.json is a save that wasn't finished, and must not open as another program's.
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
    """Return whether the description of a group or an array is JSON.

    Raises:
        CorruptCheckpoint: It isn't.
    """
    with storage.open(name) as reader:
        parse_json(reader.read(), name)
        return reader.length > 0
