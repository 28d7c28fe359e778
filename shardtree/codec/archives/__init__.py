"""torch.save's zip archives: encoding and decoding values, and reading or writing one tensor's payload in place."""

from ._decode import decode_archive as decode_archive
from ._encode import encode_archive as encode_archive
from ._payload import TensorPlace as TensorPlace
from ._payload import archive_head as archive_head
from ._payload import archive_length as archive_length
from ._payload import archive_records as archive_records
from ._payload import archive_tail as archive_tail
from ._payload import tensor_place as tensor_place
from ._records import add_record as add_record
from ._records import find_record as find_record
