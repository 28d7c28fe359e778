"""Archives that are decoded as a whole: objects, plain values, and tensors whose payload isn't in row-major order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ...storage import Reader
from .._values import Checkpoint
from ..torch import decode_with_holes
from ._listing import Listing
from ._payloads import archive_name, check_readable, opened, part_of


def decoded_at(checkpoint: Checkpoint, listing: Listing, reader: Reader, number: int) -> Any:
    """Return what an archive of an open file holds.

    Raises:
        CorruptCheckpoint: it isn't what was saved.
        UnsafeFile: it needs code to run, and `allow_pickle` isn't given.
    """
    archives = listing.archives
    data = part_of(reader, int(archives.byte[number]), 0, int(archives.length[number]))
    what = archive_name(checkpoint, listing, number)
    return decode_with_holes(data, what, checkpoint.options)


def decoded(checkpoint: Checkpoint, listing: Listing, numbers: Sequence[int]) -> Iterator[tuple[int, Any]]:
    """Yield the number of each archive and what it holds, file by file.

    Raises:
        CorruptCheckpoint: an archive isn't what was saved.
        UnsafeFile: one needs code to run, and `allow_pickle` isn't given.
    """
    wanted = np.unique(np.array(numbers, dtype=np.int64))
    check_readable(listing, wanted)
    files = listing.archives.file[wanted]
    for file in np.unique(files).tolist():
        inside = wanted[files == file].tolist()
        with opened(checkpoint, listing, file, inside) as reader:
            for number in inside:
                yield number, decoded_at(checkpoint, listing, reader, number)
