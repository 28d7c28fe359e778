"""What a lone archive of torch.save says of its own bytes: which of them have a CRC32."""

from __future__ import annotations

from ..codec import archive_records
from ..errors import CheckpointingException
from ..storage import Buffer
from ._findings import Unchecked, uncovered

HEADERS = "headers, names and padding of zip archives: compared where they say a thing twice"


def archive_unchecked(name: str, data: Buffer) -> tuple[Unchecked, ...]:
    """Return which bytes of a sound archive have no CRC32.

    Args:
        name: of the file that the archive is.
        data: its bytes.
    """
    try:
        records = archive_records(lambda begin, end: data[begin:end], data.nbytes, what=name)
    except CheckpointingException:
        records = ()  # torch wrote it in another form, which has no checksums
    covered = ((record.begin, record.begin + record.nbytes) for record in records if record.crc32)
    return uncovered(name, HEADERS, data.nbytes, covered)
