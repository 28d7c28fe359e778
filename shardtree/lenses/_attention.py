"""Lenses for attention layers: fused query, key and value tensors, and the order of rows for rotary embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np

from ..core.geometry import Column, refuse
from ..errors import MetadataError, ShapeError, error_text
from ._axis_runs import AxisRuns
from ._lens import Lens, positive
from ._mapped import mapped_axis
from ._renamed import check_names

# Fused query, key and value tensors.

FusedForm: TypeAlias = Literal["interleaved", "concatenated"]
"""Whether query, key and value alternate group by group, or are concatenated."""
_FORMS = ("interleaved", "concatenated")


def attention_qkv(
    *,
    heads: int,
    head_size: int,
    query_groups: int | None = None,
    held: FusedForm = "interleaved",
    tensor_parallel: int = 1,
    stored: FusedForm = "concatenated",
    axis: int = 0,
    part: str | None = None,
    names: Sequence[str] | None = None,
) -> Lens:
    """Return the lens that splits or reorders an attention layer's fused query, key and value tensor.

    The tensor is a weight or a bias. Interleaved is Megatron-Core's form: the queries, the key and the value of one
    query group lie one after the other, so that ranks may cut between any two groups. GPT-NeoX and BLOOM have one group
    for each head. Concatenated is the form of Phi-3 and GPT-2: all queries, then all keys, then all values. If a
    concatenated layer is tensor parallel, each rank holds its own queries, then its keys, then its values.

    Args:
        heads: Number of query heads in the whole layer.
        head_size: Number of rows of one head.
        query_groups: Number of key heads, equal to the number of value heads; `heads` by default.
        held: Form of the tensor in the model.
        tensor_parallel: Number of ranks that share the layer; needed only if `held` is "concatenated".
        stored: Form of the stored tensor; it does not matter with `names`.
        axis: Axis of the rows.
        part: Part of the key that the names replace, such as ``"linear_qkv"``.
        names: Names of the separate query, key and value tensors, such as ``("q_proj", "k_proj", "v_proj")``; without
            names, one fused tensor is stored.

    Raises:
        MetadataError: A number isn't positive, the groups don't divide the heads, or the ranks don't divide the groups.
            In the last case, several ranks would hold the same keys and values, which aren't shards of one tensor.
        TreeError: `part` and `names` are not given together, the names are not three different strings, or the key
            does not have the part exactly once.
        ShapeError: The axis has another length than all heads together.

    Examples:
        >>> import torch
        >>> from shardtree.mapping import ShardedTensor
        >>> lens = attention_qkv(heads=4, head_size=1, query_groups=2, part="qkv", names=("q", "k", "v"))
        >>> shard = ShardedTensor.from_rank_offsets("qkv", torch.arange(4), (0, 1, 2))  # the second of two groups
        >>> [(each.key, each.global_shape, each.global_offset, each.data.tolist()) for each in lens(shard).shards]
        [('q', (4,), (2,), [0, 1]), ('k', (2,), (1,), [2]), ('v', (2,), (1,), [3])]

    References:
        Megatron-Core 0.16, `SelfAttention.get_query_key_value_tensors`; transformers 5.23, `Phi3Attention`,
        `GPTNeoXAttention`.
    """
    doing = "attention_qkv"
    groups = heads if query_groups is None else query_groups
    for field, value in (("heads", heads), ("head_size", head_size), ("query_groups", groups)):
        positive(doing, field, value)
    if heads % groups:
        fix = "Count the groups of the whole layer, not of one rank."
        refuse(doing, "query_groups", groups, f"a divisor of {heads} heads", fix, error=MetadataError)
    blocks = {"interleaved": groups, "concatenated": positive(doing, "tensor_parallel", tensor_parallel)}
    for field, form in (("held", held), ("stored", stored)):
        if form not in _FORMS:
            refuse(doing, field, repr(form)[:100], f"one of {_FORMS}", "Pass a form by its name.", error=MetadataError)
    # Ranks that share a query group hold copies of its keys and values. Those would be stored twice, at the same place.
    if groups % blocks[held]:
        expected = f"a divisor of {groups} query groups"
        fix = (
            "Ranks that share a group hold copies of its keys and values: describe those as replicas, tensor by tensor."
        )
        refuse(doing, "tensor_parallel", tensor_parallel, expected, fix, error=MetadataError)
    check_names(doing, part, names, 3)
    sizes = (heads // groups * head_size, head_size, head_size)
    # With names, queries, keys and values are tensors of their own, and there are no fused blocks to be stored.
    ends = None if names is not None else groups if stored == "interleaved" else 1
    return mapped_axis(axis, lambda n: _runs(n, groups, sizes, blocks[held], ends), part=part, names=names, doing=doing)


def _runs(length: int, groups: int, sizes: Sequence[int], held_blocks: int, stored_blocks: int | None) -> AxisRuns:
    """Return the mapping of the fused axis, in which a block is [queries; keys; values] of some consecutive groups.

    Args:
        length: Length of the axis.
        groups: Number of query groups.
        sizes: Numbers of query, key and value rows in one group.
        held_blocks: Number of blocks in the model's tensor.
        stored_blocks: Number of blocks in the stored tensor; None if queries, keys and values are separate tensors.
    """
    if length != groups * sum(sizes):
        expected = (
            f"{groups * sum(sizes)}: {groups} query groups of {' + '.join(map(str, sizes))} rows (query + key + value)"
        )
        heading = "attention_qkv: the length of the axis is not the number of rows of all heads"
        fix = "Correct heads=, head_size= and query_groups=, or axis=."
        raise ShapeError(error_text(heading, found=length, expected=expected, fix=fix))
    block_groups = groups // held_blocks
    block, part, within = (index.reshape(-1) for index in np.indices((held_blocks, 3, block_groups), dtype=np.int64))
    group, rows = block * block_groups + within, np.array(sizes, dtype=np.int64)
    if stored_blocks is None:
        return AxisRuns(rows[part], part, group * rows[part], tuple(groups * size for size in sizes))
    start = _fused_starts(group, part, rows, groups // stored_blocks)
    return AxisRuns(rows[part], np.zeros_like(part), start, (length,))


def _fused_starts(group: Column, part: Column, rows: Column, each: int) -> Column:
    """Return the offset in rows of each run in a stored tensor made of blocks [queries; keys; values].

    A run is the query rows, the key rows or the value rows of one query group.

    Args:
        group: Query group of each run, int64 (runs,).
        part: 0 for a run of queries, 1 for keys, 2 for values, int64 (runs,).
        rows: Numbers of query, key and value rows in one group, int64 (3,).
        each: Number of groups in one block.
    """
    before: Column = np.cumsum(rows) - rows
    block: Column = group // each * int(rows.sum()) + before[part]
    return each * block + group % each * rows[part]


# Rotary embeddings rotate pairs of rows: two neighbours, or one row from each half of a head.


def rotary_halves(*, head_size: int, rotary_size: int | None = None, axis: int = 0) -> Lens:
    """Return the lens that stores rotary pairs, neighbouring rows in the model, in the two halves of a head.

    Rotary embeddings rotate rows in pairs. In the model, as in Meta's Llama, a pair is two neighbouring rows. In the
    stored tensor, as in Hugging Face's Llama, a row in the first half of a head is paired with the row at the same
    index in the second half. The lens is for queries and keys, not for values: after `attention_qkv`, apply it with
    `by_pattern` to the queries' and keys' tensors only.

    Args:
        head_size: Number of rows of one head; the number of heads follows from the axis.
        rotary_size: Number of rotated rows at the start of each head; all by default.
        axis: Axis of the rows.

    Raises:
        MetadataError: A number isn't positive, or an odd number of rows would be rotated.
        ShapeError: The length of the axis isn't a multiple of `head_size`.

    Examples:
        >>> import torch
        >>> from shardtree.mapping import ShardedTensor
        >>> shard = ShardedTensor.from_rank_offsets("q", torch.arange(8))
        >>> rotary_halves(head_size=4)(shard).shards[0].data
        tensor([0, 2, 1, 3, 4, 6, 5, 7])

    References:
        transformers 5.23, `PermuteForRope`.
    """
    return _rotary("rotary_halves", (2, -1), head_size, rotary_size, axis)


def rotary_pairs(*, head_size: int, rotary_size: int | None = None, axis: int = 0) -> Lens:
    """Return the inverse of `rotary_halves`: it stores pairs from a head's two halves as neighbouring rows.

    The arguments and errors are those of `rotary_halves`.

    Examples:
        >>> import torch
        >>> from shardtree.mapping import ShardedTensor
        >>> shard = ShardedTensor.from_rank_offsets("q", torch.arange(6))
        >>> rotary_pairs(head_size=6)(shard).shards[0].data
        tensor([0, 3, 1, 4, 2, 5])
    """
    return _rotary("rotary_pairs", (-1, 2), head_size, rotary_size, axis)


def _rotary(doing: str, table: tuple[int, int], head_size: int, rotary_size: int | None, axis: int) -> Lens:
    """Return the lens that permutes the rotated rows of each head, like the transposition of a table.

    Args:
        doing: Name of the lens in errors.
        table: Shape of the table; stored rows fill it row by row, and the model's rows column by column.
        head_size: Number of rows of one head.
        rotary_size: Number of rotated rows at the start of each head; all if None.
        axis: Axis of the rows.
    """
    size = positive(doing, "head_size", head_size)
    count = size if rotary_size is None else positive(doing, "rotary_size", rotary_size)
    if count % 2 or count > size:
        fix = "Rows are rotated in pairs."
        refuse(doing, "rotary_size", count, f"an even number up to {size}", fix, error=MetadataError)
    head = np.concatenate([np.arange(count).reshape(table).T.reshape(-1), np.arange(count, size)])

    def runs(length: int) -> AxisRuns:
        if length % size:
            heading = f"{doing}: the length of axis {axis} is not a multiple of head_size"
            expected, fix = f"a multiple of head_size={size}", "Correct head_size= or axis=."
            raise ShapeError(error_text(heading, found=length, expected=expected, fix=fix))
        start = (np.arange(0, length, size)[:, None] + head).reshape(-1)
        return AxisRuns(np.ones_like(start), np.zeros_like(start), start, (length,))

    return mapped_axis(axis, runs, doing=doing)
