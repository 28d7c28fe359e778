"""Limits of memory: the bytes that a save, a load or a check holds at once, and the largest files read as a whole.

A save holds, beside the tree, the bytes that its threads have copied and not yet written:

- on the way to a local disk, two parts of `COPIED_BYTES`, or one of `LAZY_BYTES`, for each of at most four threads;
- on the way to a store, `UPLOAD_BYTES` for each of two files.

A load reads into the target's own memory. Beside that it holds at most:

- `WINDOW_BYTES` for each thread that reads local files;
- `IN_FLIGHT_BYTES` of a store's answers for the whole process;
- two parts of `STAGED_BYTES` if the target is on a device;
- `CAST_BYTES` of elements that are converted;
- `EXCHANGE_BYTES` if ranks exchange what they read.

Both also hold metadata. A JSON file that exceeds its bound isn't decoded, so that a forged one can't fill the memory.
Two things have no bound: an index with all its chunks, and the copy of the tree in an asynchronous save.

Functions with the argument `max_bytes_in_flight` take another bound from their caller; all other limits are fixed.
Sizes that choose between two algorithms, and bounds of one foreign format, are defined in the modules that use them.
"""

from __future__ import annotations

_MIB = 1024 * 1024

# Reading and writing files

STEP_BYTES = _MIB
"""Bytes hashed, compared or decompressed at a time: they stay in the processor's cache, and are whole hash blocks."""

WINDOW_BYTES = 16 * _MIB
"""Upper bound of the bytes of a local file that a thread reads before it looks for more work."""

REQUEST_BYTES = 8 * _MIB
"""Requests to a store end at multiples of this size, which are also ends of hash blocks, so that no two requests fetch
the same bytes. A piece that crosses a multiple belongs to the request in which it begins."""

IN_FLIGHT_BYTES = 256 * _MIB
"""Upper bound of the bytes that all loads of a process have requested from stores and not yet processed."""

UPLOAD_PART_BYTES = 8 * _MIB
"""Size of one part of a file that is uploaded to a store."""

UPLOAD_BYTES = 40 * _MIB
"""Upper bound of the bytes of one file that are copied and not yet uploaded to a store."""

# Tensors between the host's memory and elsewhere

STAGED_BYTES = 32 * _MIB
"""Bytes staged at a time between the host and a device: parts of a plan rather than whole shards, so that one large
tensor takes no more host memory than many small ones."""

COPIED_BYTES = 4 * _MIB
"""Upper bound of the bytes copied at once from a tensor whose memory can't be written to a file directly."""

LAZY_BYTES = 4 * _MIB
"""Upper bound of the bytes read at once from a lazy tensor: each read is planned, and opens its file, which takes about
as long as reading a MiB."""

COMPUTED_BYTES = 16 * _MIB
"""Size of one window of a computed lazy tensor, with its parts of the operands and of the result."""

CAST_BYTES = 256 * _MIB
"""Upper bound of the stored elements that a rank buffers for a conversion; a single tensor may take more."""

# Between ranks: the bytes that a rank sends and receives in one step

EXCHANGE_BYTES = 64 * _MIB
"""Bytes of a step in a load's exchange. Long parts aren't copied: even large steps take little memory."""

RESHARD_BYTES = 256 * _MIB
"""Bytes of a step in a plan's schedule, by default. This high bound leaves a schedule few steps."""

REDISTRIBUTE_BYTES = 32 * _MIB
"""Bytes of a step in `redistribute`, by default. Larger buffers were slower in every case measured over gloo: these
stay in the processor's caches."""

# Checks

COMPARED_BYTES = 64 * _MIB
"""Bytes of tensors that a comparison of checkpoints holds at a time, by default; also in a conversion's check."""

CHECKED_BYTES = 32 * _MIB
"""Bytes that a pass over stored or replicated tensors holds at a time: to verify, compare replicas or round masters."""

# Guards: larger files are refused before they are read

METADATA_BYTES = 16 * _MIB
"""Bound on a `metadata.json`, which might be a file of 1 TB with holes."""

SIDE_FILE_BYTES = 64 * _MIB
"""Bound on a JSON file beside a checkpoint's own: the record of a step, or a manifest of checksums."""

HEADER_BYTES = 64 * _MIB
"""Bound on a written safetensors header, at which a new file begins: readers refuse headers of over 100 MB."""

ERROR_BYTES = 16 * _MIB
"""Bound on the attributes of an error for other ranks: enough for a hundred thousand keys, not for a large tensor."""
