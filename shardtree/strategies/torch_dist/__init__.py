"""Archives of torch.save in data files: Megatron-Core's `torch_dist`, and what torch.distributed.checkpoint writes."""

from ._backends import DCP as DCP
from ._backends import INDEX_FILE as INDEX_FILE
from ._backends import TORCH_DIST as TORCH_DIST
from ._commit import commit as commit
from ._commit import commit_dcp as commit_dcp
from ._common import load_common as load_common
from ._common import load_dcp_common as load_dcp_common
from ._common import recognize as recognize
from ._list import list_files as list_files
from ._listing import Listing as Listing
from ._listing import read_listing as read_listing
from ._load import load_metadata as load_metadata
from ._load import load_objects as load_objects
from ._load import load_sharded as load_sharded
from ._save import save_dcp_sharded as save_dcp_sharded
from ._save import save_sharded as save_sharded
from ._save_common import save_common as save_common
from ._save_common import save_dcp_common as save_dcp_common
from ._verify import verify_files as verify_files
