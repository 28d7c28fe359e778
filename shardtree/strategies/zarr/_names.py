"""From a tensor's key to the name of its array's folder."""

from __future__ import annotations

from urllib.parse import quote

from ...storage import digest

_AS_THEY_ARE = "+=@,()[]"
_LONGEST = 200
_TAKEN = {"zarr.json", "metadata.json"}


def array_name(key: str) -> str:
    """Return the folder that the array of a key goes to: the key itself where its characters are harmless.

    Other characters are percent-encoded, as in a URL, and so is the first one of a name that is taken or hidden. A
    name longer than 200 characters is cut, and ends with a hash of the key.

    Examples:
        >>> array_name("decoder.layers.0.weight"), array_name("a/b"), array_name(".."), array_name("_shardtree")
        ('decoder.layers.0.weight', 'a%2Fb', '%2E.', '%5Fshardtree')
        >>> array_name("x" * 300)[170:]
        'xxxxxxxxxxxxx~a5d1b4607dc83554'
    """
    name = quote(key, safe=_AS_THEY_ARE)
    if name[0] in "._" or name in _TAKEN:
        name = f"%{ord(name[0]):02X}{name[1:]}"
    if len(name) <= _LONGEST:
        return name
    return f"{name[: _LONGEST - 17]}~{digest(key.encode())}"
