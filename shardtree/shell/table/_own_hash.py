"""The hash that metadata.json stores of its own content."""

from __future__ import annotations

from collections.abc import Mapping
from operator import ne
from typing import Any

from ...core.codec import canonical_json
from ..storage import digest


def encode_metadata(fields: Mapping[str, Any]) -> bytes:
    """Return metadata.json's bytes: canonical JSON of the fields and of the hash of their JSON.

    Examples:
        >>> encode_metadata({"sharded_backend": "safetensors"})
        b'{"digest":"20af11980b75f348","sharded_backend":"safetensors"}'
    """
    plain = {name: value for name, value in fields.items() if name != "digest"}
    return canonical_json({**plain, "digest": digest(canonical_json(plain))})


def has_misnamed_digest(fields: Mapping[str, Any]) -> bool:
    """Return whether a field holds the hash of all other fields, but has a name one character off `digest`.

    Without this test, a flipped bit in the name `digest` would make the file look as if it never had a hash.

    Examples:
        >>> import json
        >>> text = encode_metadata({"sharded_backend": "dcp"}).decode()
        >>> has_misnamed_digest(json.loads(text.replace("digest", "digert")))
        True
    """
    near = [name for name in fields if len(name) == 6 and sum(map(ne, name, "digest")) == 1]
    others = {name: value for name, value in fields.items() if name not in near}
    return len(near) == 1 and fields[near[0]] == digest(canonical_json(others))
