"""Bytes: local files, memory, file systems behind URLs, block hashes, and the reads and writes of tensors' memory."""

from ._blocks import BLOCK_BYTES as BLOCK_BYTES
from ._blocks import BlockHasher as BlockHasher
from ._blocks import Hashes as Hashes
from ._blocks import block_count as block_count
from ._blocks import block_hashes as block_hashes
from ._blocks import digest as digest
from ._blocks import hash_column as hash_column
from ._blocks import hashed as hashed
from ._blocks import hashed_beside as hashed_beside
from ._blocks import in_parts as in_parts
from ._buffers import STAGED_BYTES as STAGED_BYTES
from ._buffers import copies_of as copies_of
from ._buffers import empty_tensor as empty_tensor
from ._buffers import is_in_place as is_in_place
from ._buffers import tensor_buffers as tensor_buffers
from ._cost import fetch_cost as fetch_cost
from ._fetch import ReadReport as ReadReport
from ._fetch import StoredFile as StoredFile
from ._fetch import Verify as Verify
from ._fetch import fetch as fetch
from ._folders import Directory as Directory
from ._folders import NewFolder as NewFolder
from ._folders import Renaming as Renaming
from ._folders import folder_in as folder_in
from ._folders import is_link as is_link
from ._folders import is_same_place as is_same_place
from ._folders import new_folder as new_folder
from ._folders import storage_at as storage_at
from ._fsspec import FsspecStorage as FsspecStorage
from ._fsspec import fsspec_storage as fsspec_storage
from ._local import LocalStorage as LocalStorage
from ._memory import BytesReader as BytesReader
from ._memory import MemoryStorage as MemoryStorage
from ._owner import Claim as Claim
from ._owner import claim as claim
from ._owner import is_alive as is_alive
from ._owner import is_claimed as is_claimed
from ._owner import owner_note as owner_note
from ._owner import release as release
from ._storage import Buffer as Buffer
from ._storage import Exchanging as Exchanging
from ._storage import Reader as Reader
from ._storage import Sibling as Sibling
from ._storage import SizedBuffers as SizedBuffers
from ._storage import Storage as Storage
from ._storage import is_temporary as is_temporary
from ._stretches import Stretches as Stretches
from ._stretches import joined_crc32 as joined_crc32
from ._stretches import read_crc32 as read_crc32
from ._threads import background_threads as background_threads
from ._threads import collector_paused as collector_paused
from ._threads import in_threads as in_threads
from ._threads import in_turn as in_turn
from ._threads import usual_threads as usual_threads

__all__ = [
    "Buffer",
    "BytesReader",
    "Directory",
    "Exchanging",
    "LocalStorage",
    "MemoryStorage",
    "ReadReport",
    "Reader",
    "Sibling",
    "SizedBuffers",
    "Storage",
    "StoredFile",
    "Stretches",
    "Verify",
]
