"""torch.save's zip archives: encoding and decoding values, and reading or writing a tensor's payload in place."""

from ._decode import decode_archive
from ._describe import DTensorParts, Placement, StoredDTensor, describe_archive
from ._encode import StreamedTensor, encode_archive, streamed_archive
from ._fill import Box, box_of, fill_tensor, filled_tensor, reach, strips
from ._payload import (
    StoredTensor,
    archive_ends,
    archive_head,
    archive_length,
    archive_records,
    archive_tail,
    read_crc32,
    tensor_place,
)
from ._zip import Record, add_record, find_record
