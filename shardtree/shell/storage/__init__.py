"""Storages of local folders and the protocol for others, block hashes, and reads and writes of tensors' memory."""

import typing

from ._blocks import (
    BLOCK_BYTES,
    BlockHasher,
    Hashes,
    Verify,
    block_count,
    block_hashes,
    digest,
    hash_column,
    hashed,
    in_parts,
    reported,
)
from ._buffers import (
    DeviceCopies,
    HostMemory,
    copies_of,
    empty_tensor,
    host_memory,
    is_in_place,
    tensor_buffers,
)
from ._capabilities import (
    Capabilities,
    Entry,
    Function,
    abort_open_uploads,
    can,
    file_lengths,
    files_in,
    is_folder,
    is_link,
    locked,
    make_folder,
    move,
    read_if_there,
    remove_files,
    remove_folder,
    siblings,
    sync_folder,
    threads_of,
    write_parts,
)
from ._checked import ByteRanges, ReadReport, StoredFile, crc32_behind, joined_crc32, write_hashed
from ._folders import (
    Directory,
    NewFolder,
    folder_in,
    is_same_place,
    new_folder,
    storage_at,
    take_refusals,
    with_own_refusals,
)
from ._local import LocalStorage
from ._owner import Claim, claim, is_alive, is_claimed, made_here, maker_is_dead, owner_note, process_token, release
from ._refusals import Refusal, Refusals, SaveReport
from ._storage import (
    AnyBuffer,
    Buffer,
    Reader,
    Sibling,
    SizedBuffers,
    Storage,
    byte_view,
    copy_bytes,
    inside,
    is_left_over,
    is_temporary,
    parts_in_file,
)
from ._threads import Task, background_threads, in_threads, in_turn, usual_threads, write_behind
from ._wrapped import Listed, around, listed, prefetch, settle, wrapped

if typing.TYPE_CHECKING:
    from ._fetch import fetch, fetch_from_memory, fetch_run
    from ._network import crosses_network
    from ._requests import fetch_cost
else:
    from ...core.deferred import later

    __getattr__ = later(
        __name__,
        {
            "._fetch": "fetch fetch_from_memory fetch_run",
            "._network": "crosses_network",
            "._requests": "fetch_cost",
        },
    )
