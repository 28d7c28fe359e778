"""Bytes: local files, memory, file systems behind URLs, block hashes, and the reads and writes of tensors' memory."""

from ._blocks import BLOCK_BYTES as BLOCK_BYTES
from ._blocks import BlockHasher as BlockHasher
from ._blocks import Hashes as Hashes
from ._blocks import block_count as block_count
from ._blocks import block_hashes as block_hashes
from ._blocks import digest as digest
from ._blocks import hash_column as hash_column
from ._blocks import hashed as hashed
from ._buffers import tensor_buffers as tensor_buffers
from ._empty import empty_tensor as empty_tensor
from ._fetch import ReadReport as ReadReport
from ._fetch import StoredFile as StoredFile
from ._fetch import Verify as Verify
from ._fetch import fetch as fetch
from ._fsspec import FsspecStorage as FsspecStorage
from ._fsspec import fsspec_storage as fsspec_storage
from ._local import LocalStorage as LocalStorage
from ._locate import Directory as Directory
from ._locate import storage_at as storage_at
from ._memory import MemoryStorage as MemoryStorage
from ._storage import Buffer as Buffer
from ._storage import Reader as Reader
from ._storage import Storage as Storage
from ._stretches import Stretches as Stretches
from ._stretches import read_crc32 as read_crc32
