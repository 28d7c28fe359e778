"""torch.save's zip archives: encoding and decoding values, and reading or writing one tensor's payload in place."""

from ._decode import decode_archive
from ._describe import Description, StoredDTensor, StoredTensor, describe_archive, filled_tensor
from ._dtensors import DTensorParts, Placement
from ._encode import encode_archive
from ._payload import (
    TensorPlace,
    archive_ends,
    archive_head,
    archive_length,
    archive_records,
    archive_tail,
    tensor_place,
)
from ._records import add_record, find_record
from ._streamed import StreamedTensor, streamed_archive
from ._zip import Record
