"""Import paths of the functions that the packages `core` and `shell` use from packages that build on them.

Such a function is called a leaf here. A save or load in our own format needs only the leaf `formats`, which returns
rows of the dispatch table; the others are imported on demand. A path is a module of shardtree and, after a colon, a
name in it.
"""

from __future__ import annotations

LEAVES: dict[str, str] = {
    "beyond_tolerances": "transforms._beyond:beyond_tolerances",
    "differing_replicas": "inspection._replicas:differing_replicas",
    "drop_objects": "transforms._object_rules:drop_objects",
    "formats": "_formats:rows",
    "html_of": "pictures._display:html_of",
    "new_address": "_moved:new_address",
    "not_a_checkpoint": "inspection._no_checkpoint:not_a_checkpoint",
    "read_together": "live._reading:read_together",
    "storage_behind": "stores._url:storage_behind",
    "remove_sharded": "maintenance:remove_sharded",
    "through_trace": "lenses:through_trace",
    "verify_index": "maintenance:verify_index",
}
