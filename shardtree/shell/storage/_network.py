"""Recognition of storages that are read through a network."""

from __future__ import annotations

import os

from ._capabilities import can
from ._local import LocalStorage
from ._storage import Storage

_NETWORK = {
    *("nfs", "nfs4", "lustre", "gpfs", "ceph", "beegfs", "wekafs", "glusterfs", "orangefs", "panfs", "afs"),
    *("cifs", "smb3", "smbfs", "9p", "virtiofs"),
}
_MOUNTS = "/proc/self/mountinfo"


def crosses_network(storage: Storage) -> bool:
    """Return whether reads of a storage cross a network, judged by its class or by its mount.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> crosses_network(MemoryStorage()), crosses_network(LocalStorage("/proc"))
        (False, False)
    """
    if isinstance(storage, LocalStorage):
        kind = file_system_of(storage.root)
        # File systems in user space ("fuse.…") are buckets, sshfs and the like; "fuseblk" is a local disk.
        return kind in _NETWORK or kind.startswith("fuse.")
    # A storage that answers without a request, such as memory, declares a latency of zero.
    return can(storage).latency != 0.0


def file_system_of(path: str) -> str:
    """Return Linux's name for the type of the file system that holds a path; "" if unknown.

    Examples:
        >>> file_system_of("/proc"), file_system_of("/no/such/path")
        ('proc', '')
    """
    try:
        device = os.stat(path).st_dev
        with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as mounts:
            lines = [line.split() for line in mounts]
    except OSError:
        return ""
    number = f"{os.major(device)}:{os.minor(device)}"
    # A line has optional fields, then a dash, then the type.
    return next((fields[fields.index("-") + 1] for fields in lines if fields[2] == number), "")
