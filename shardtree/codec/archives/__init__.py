"""torch.save's zip archives: values from and to bytes, where a lone tensor's payload is, and what goes around it."""

from ._beside import add_record as add_record
from ._beside import find_record as find_record
from ._decode import decode_archive as decode_archive
from ._encode import encode_archive as encode_archive
from ._place import TensorPlace as TensorPlace
from ._place import archive_records as archive_records
from ._place import tensor_place as tensor_place
from ._shell import archive_head as archive_head
from ._shell import archive_length as archive_length
from ._shell import archive_tail as archive_tail
