"""Weights by a plan of shardtree's, in a program that doesn't install it: copy this file, which needs torch alone.

`carry_out` moves what a rank sends and gets, whatever carries bytes; `differing` proves that it came as it was sent.
"""

import json

import torch

FORMAT = ("shardtree.ReshardPlan", 1)
# Torch copies these bit for bit.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
LARGEST = 2**64
ROW = 1024  # words of 8 bytes in a row of the matrix that is summed
AT_ONCE = 64  # rows, so that a processor's cache holds them


def read_plan(text):
    """Return a plan: the JSON text that `ReshardPlan.to_json` gives, as a dict."""
    plan = json.loads(text)
    if (plan.get("format"), plan.get("version")) != FORMAT:
        raise ValueError(f"not a plan that this file knows: {plan.get('format')!r} {plan.get('version')!r}")
    return plan


def carry_out(plan, rank, sources, targets, put, get):
    """Fill a rank's targets; every rank of the plan calls it. Return the sums of what it sent, and of what came.

    All ranks go through the plan's transfers in one order, so that calls that wait don't wait in a circle.

    Args:
        plan: as `read_plan` gives it.
        rank: this one, in the plan's numbering.
        sources: by key, its tensors; a list in the plan's order where it holds several parts of one.
        targets: likewise, contiguous, of the plan's dtypes; they are filled in place.
        put: called as ``put(rank, data)`` to send row-major bytes, uint8 (bytes,); it returns when they may change.
        get: called as ``get(rank, nbytes)``; returns them, on any device.

    Returns:
        Two dicts from a transfer's row to a number of 64 bits.
    """
    moved, sent, got = plan["transfers"], {}, {}
    held, wanted = _shards(plan["source"], rank, sources), _shards(plan["target"], rank, targets)
    for row, (giver, taker) in enumerate(zip(moved["from_rank"], moved["to_rank"], strict=True)):
        if rank not in (giver, taker):
            continue
        kind = plan["target"]["tensors"][moved["key"][row]]
        dtype = getattr(torch, kind["dtype"])
        if rank == giver:
            # At later hops elements come from a target, which has them by then.
            had, data = _box(moved, row, "source", wanted if moved["hop"][row] else held)
            data = data.contiguous() if had == dtype else data.view(had).to(dtype).view(BITS[dtype.itemsize])
        if rank == taker:
            _, box = _box(moved, row, "target", wanted)
        if giver == taker:
            box.copy_(data)
        elif rank == giver:
            data = data.view(-1).view(torch.uint8)
            sent[row] = total(data)
            put(taker, data)
        else:
            box.copy_(get(giver, moved["nbytes"][row]).view(box.dtype).view(box.shape))
            got[row] = total(box.contiguous().view(-1).view(torch.uint8))  # of the target itself
    return sent, got


def differing(plan, sent, got):
    """Return what came otherwise than it was sent, or wasn't told of, as lines of text: key, box and ranks.

    Args:
        plan: as `read_plan` gives it.
        sent: the sums of all ranks that sent something, by row, in one dict.
        got: of those that got it, of this rank or of all.
    """
    moved, lines = plan["transfers"], []
    for row in sorted(got):
        if sent.get(row) != got[row]:
            kind = plan["target"]["tensors"][moved["key"][row]]
            sides = zip(moved["offset"][row], moved["shape"][row], strict=True)
            box = ", ".join(f"{low}:{low + size}" for low, size in list(sides)[plan["axes"] - len(kind["shape"]) :])
            lines.append(f"{kind['key']!r} [{box}]: rank {moved['from_rank'][row]} → rank {moved['to_rank'][row]}")
    return lines


def _shards(layout, rank, tensors):
    """Return a rank's tensors by the row of their shard."""
    columns, found, left = layout["shards"], {}, {}
    for row, holder in enumerate(columns["rank"]):
        if holder == rank:
            key = layout["tensors"][columns["key"][row]]["key"]
            if key not in left:
                own = tensors[key]
                left[key] = list(own) if isinstance(own, (list, tuple)) else [own]
            found[row] = left[key].pop(0)
    return found


def _box(moved, row, side, shards):
    """Return the dtype of a shard's tensor, and a transfer's box of it, as bits."""
    data = shards[moved[side][row]].detach()
    # Places are counted in the row-major elements of what a rank holds, of a flat range too.
    bits = data.view(BITS[data.itemsize])
    flat = bits.view(-1) if side == "target" else bits.contiguous().view(-1)
    first = flat.storage_offset() + moved[f"{side}_element"][row]
    return data.dtype, flat.as_strided(moved["shape"][row], moved[f"{side}_stride"][row], first)


# The sum of bytes, as docs/checks.md defines it. Torch's integers are signed, and wrap around as unsigned ones
# do; only a shift to the right has to be masked.


def total(data):
    """Return the sum of bytes, uint8 (bytes,), in which each bit and its place counts; computed where they are."""
    room = data.new_zeros(-(-data.numel() // (8 * ROW)) * 8 * ROW)
    room[: data.numel()] = data
    words, found = room.view(torch.int64).view(-1, ROW), 0
    columns = _weights(1, 0, ROW).to(data.device)
    for first in range(0, len(words), AT_ONCE):
        part = words[first : first + AT_ONCE]
        mixed = _folded(_folded(part, 32) * _signed(0x9E3779B97F4A7C15), 32) + _signed(0xD1B54A32D192ED03)
        found += int(((mixed * columns).sum(1) * _weights(0, first, first + len(part)).to(data.device)).sum())
    return found % LARGEST


def _weights(axis, start, stop):
    index = torch.arange(start, stop)
    return _odd(2 * axis, index >> 16) * _odd(2 * axis + 1, index & 0xFFFF)


def _odd(stream, number):
    seed = _scrambled(torch.tensor([stream + 1]))
    return _scrambled(seed + (number + 1) * _signed(0x9E3779B97F4A7C15)) | 1


def _scrambled(x):
    x = _folded(x, 30) * _signed(0xBF58476D1CE4E5B9)
    return _folded(_folded(x, 27) * _signed(0x94D049BB133111EB), 31)


def _folded(x, bits):
    return x ^ (x >> bits & (1 << 64 - bits) - 1)


def _signed(number):
    return number - LARGEST if number >= LARGEST // 2 else number
