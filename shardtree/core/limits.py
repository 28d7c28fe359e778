"""Limits of memory: the bytes that a save, a load or a check holds at once, and the largest files read as a whole.

A save holds, beside the tree, what its threads have copied and not yet written: two parts of `COPIED_BYTES`, or one of
`LAZY_BYTES`, for each of at most four threads on a local disk; on the way to a store, `UPLOAD_BYTES` for each of two
files. A load reads into the target's own memory. Beside that it holds `WINDOW_BYTES` or less for each thread that reads
local files, `IN_FLIGHT_BYTES` of a store's answers for the whole process, two parts of `STAGED_BYTES` where the target
lies on a device, and `CAST_BYTES` of elements that are converted; an exchange between ranks adds `EXCHANGE_BYTES`.
Metadata come on top. No file of JSON is decoded that passes its bound, so that a forged one can't fill the memory. Two
things are as large as they are: an index with all its chunks, and the copy of the tree that an asynchronous save makes.

What has `max_bytes_in_flight` takes another bound from its caller; the rest is the same for everybody. Sizes that
decide between two ways of doing the same, and bounds of one foreign format, stand beside their code.
"""

from __future__ import annotations

_MIB = 1024 * 1024

# Reading and writing files

STEP_BYTES = _MIB
"""Step in which bytes are hashed, compared or decompressed: it stays in the processor's cache. Whole hashed blocks."""

WINDOW_BYTES = 16 * _MIB
"""The most of a local file that a thread reads before it looks for more work."""

REQUEST_BYTES = 8 * _MIB
"""Requests to a store end at multiples of this, where blocks end, so that two of them don't fetch the same bytes;
pieces that lie across one are fetched with what comes before."""

IN_FLIGHT_BYTES = 256 * _MIB
"""Answers of stores that all loads of a process wait for, or have not yet taken."""

UPLOAD_PART_BYTES = 8 * _MIB
"""One part of a file that is uploaded to a store."""

UPLOAD_BYTES = 40 * _MIB
"""Parts of one file that are copied and on their way to a store."""

# Tensors between the host's memory and elsewhere

STAGED_BYTES = 32 * _MIB
"""Bytes staged at a time between the host and a device: parts of a plan rather than whole shards, so that one large
tensor takes no more host memory than many small ones."""

COPIED_BYTES = 4 * _MIB
"""The most that is copied at once of a tensor whose memory can't be written in place."""

LAZY_BYTES = 4 * _MIB
"""The most that is read at once of a lazy tensor: each read is planned, and opens its file, which takes about as long
as reading a MiB."""

COMPUTED_BYTES = 16 * _MIB
"""One window of a computed lazy tensor: its parts of the operands and of the result."""

CAST_BYTES = 256 * _MIB
"""The most bytes that a rank buffers of stored elements that are to be converted; a single tensor may take more."""

# Between ranks: what a rank sends and gets in one step

EXCHANGE_BYTES = 64 * _MIB
"""Of a load's exchange. Long parts go from and to where they lie: large steps take little memory."""

RESHARD_BYTES = 256 * _MIB
"""Of a schedule of a plan, by default. A bound this high leaves a schedule few steps."""

REDISTRIBUTE_BYTES = 32 * _MIB
"""Of `redistribute`, by default. Larger buffers were slower in every case measured over gloo: these stay in the
processor's caches."""

# Checks

COMPARED_BYTES = 64 * _MIB
"""Tensors of two checkpoints that are compared at a time, by default; also what a conversion reads back."""

CHECKED_BYTES = 32 * _MIB
"""Bytes that a pass over stored or replicated tensors holds at a time: to verify, compare replicas or round masters."""

# Guards: larger files are refused before they are read

METADATA_BYTES = 16 * _MIB
"""A `metadata.json`: it might be a file of 1 TB with holes."""

SIDE_FILE_BYTES = 64 * _MIB
"""A file of JSON beside a checkpoint's own: the record of a step, or a manifest of checksums."""

HEADER_BYTES = 64 * _MIB
"""A header of safetensors that is written; a new file begins before it, since readers refuse headers of over 100 MB."""

ERROR_BYTES = 16 * _MIB
"""Attributes of an error that goes to other ranks: enough for the names of a hundred thousand keys, not for a large
tensor."""
