"""Megatron-Core's format of the common state: one file that torch.save writes, ``common.pt``."""

from ._common import BACKEND as BACKEND
from ._common import COMMON_FILE as COMMON_FILE
from ._common import VERSION as VERSION
from ._common import load_common as load_common
from ._common import save_common as save_common
from ._common import verify_common as verify_common
from ._holes import decode_with_holes as decode_with_holes
from ._holes import encode_with_holes as encode_with_holes
