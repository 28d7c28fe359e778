"""Form: the stored tensors of a quantised weight, as one value that cuts, reads and writes them together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch

from ..core.lazy import Box, Boxwise, LazyTensor, Recipe, has_no_elements, memory_beside, of_source
from ..core.mapping import ShardedTensor
from ..errors import ShapeError, TreeError, UnsupportedValue, error_text
from ..lenses import StoredForm, as_factory
from ._encode import Encode, blocks_of, encoded
from ._part import Join, Part, decoded, in_pieces, inside, is_of_blocks, joined, owned, scaled, shard_of


@dataclass(frozen=True, slots=True)
class Form:
    """A way to store a quantised weight: its stored tensors, and how values, scales and so on make up the weight.

    `FORMS` has the established forms by name. A form is immutable: `dataclasses.replace` returns one with other names
    or blocks.

    Attributes:
        name: Name of the form, for messages.
        parts: Descriptions of the stored tensors; the one with the values comes first.
        base: Suffix of the weight's key that the names of `parts` replace; empty if they are appended to the key.
        is_turned: Whether the weight's matrices are stored transposed.
        block: Shape of a block of elements that are quantised together, along the last two axes of the stored matrices;
            0 means the whole axis.
        encode: Function from float32 matrices of whole blocks, (..., rows, columns), and `block`, to the stored
            tensors; None for a form that can only be read.
        join: Function from the decoded elements of all stored tensors to the elements of the weight, as float32.
        without: Suffixes of tensors that only other forms have: if a weight has such a tensor, it isn't of this form.
    """

    name: str
    parts: tuple[Part, ...]
    base: str = ""
    is_turned: bool = False
    block: tuple[int, int] = (1, 1)
    encode: Encode | None = None
    join: Join = scaled
    without: tuple[str, ...] = ()

    # Names and shapes of the stored tensors.

    def keys(self, key: str) -> tuple[str, ...]:
        """Return the keys of a weight's stored tensors.

        Raises:
            TreeError: the weight's key doesn't end with the form's suffix `base`.

        Examples:
            >>> from shardtree.quantised import FORMS
            >>> FORMS["fp8_blocks"].keys("mlp.up.weight")
            ('mlp.up.weight', 'mlp.up.weight_scale_inv')
        """
        if not key.endswith(self.base):
            heading = f"quantised: {key!r} cannot be the key of a weight stored as {self.name}"
            raise TreeError(error_text(heading, expected=f"a key that ends with {self.base!r}"))
        return tuple([key.removesuffix(self.base) + part.name for part in self.parts])

    def found(self, tensors: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
        """Return the keys of the stored tensors of each weight of this form, by the weight's key.

        A weight counts if it has all tensors of the form, whatever their dtypes and shapes, and none of `without`.
        """
        first = self.parts[0].name
        stems = [key.removesuffix(first) for key in tensors if key.endswith(first)]
        weights = [stem + self.base for stem in stems if not any(stem + name in tensors for name in self.without)]
        return {key: parts for key in weights if set(parts := self.keys(key)) <= tensors.keys()}

    def shape_of(self, key: str, tensors: Mapping[str, Any]) -> tuple[int, ...]:
        """Return a weight's shape, derived from its stored tensors.

        Args:
            key: Key of the weight.
            tensors: Stored tensors by key, or their shards; other keys are ignored.

        Raises:
            ShapeError: the tensor of values has fewer than two axes, a tensor has a dtype that the form doesn't list,
                or its shape doesn't fit the shape of the values; the error names all such tensors.
        """
        names = self.keys(key)
        values = [tensors[name] for name in names]
        shapes = [tuple(value.global_shape if hasattr(value, "global_shape") else value.shape) for value in values]
        front = len(shapes[0]) - len(self.parts[0].tail) - 2
        if front < 0:
            found = f"{names[0]!r}: {shapes[0]}"
            raise ShapeError(error_text(f"quantised: {self.name} needs matrices", found=found))
        sizes = zip(shapes[0][front : front + 2], self.parts[0].pack, strict=True)
        whole = (*shapes[0][:front], *(size * pack for size, pack in sizes))
        wrong = []
        for name, part, shape in zip(names, self._parts(whole), shapes, strict=True):
            dtype, expected = tensors[name].dtype, part.box((0,) * len(whole), whole).shape
            if dtype not in part.dtypes or shape != expected:
                kinds = " or ".join(str(kind).removeprefix("torch.") for kind in part.dtypes)
                wrong.append(f"{name!r}: {str(dtype).removeprefix('torch.')} {shape}, not {kinds} {expected}")
        if wrong:
            fix = "Choose the Form of config.json; `block` and the parts' `per` must have config.json's block sizes."
            raise ShapeError(error_text(f"quantised: {key!r} is not stored as {self.name}", offenders=wrong, fix=fix))
        return self._turn(whole)

    def means(self, shape: Sequence[int]) -> tuple[object, ...]:
        """Return a value that is equal for two forms if they decode weights of this shape in the same way.

        Forms that differ only in block sizes are equal if these are the same when clipped to the shape.

        Examples:
            >>> from shardtree.quantised import FORMS
            >>> rows, blocks = FORMS["fp8_rows"], FORMS["fp8_blocks_scale"]
            >>> rows.means((1, 100)) == blocks.means((1, 100)), rows.means((2, 100)) == blocks.means((2, 100))
            (True, False)
        """
        sizes = self._turn(shape)[-2:]
        parts = tuple(
            replace(
                part, per=part.per and tuple(min(n or size, size) for n, size in zip(part.per, sizes, strict=False))
            )
            for part in self.parts
        )
        return self.base, self.is_turned, self.join, parts

    # Whole weights, eagerly.

    def dequantise(
        self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.bfloat16
    ) -> dict[str, torch.Tensor]:
        """Return dequantised weights by key. `shardtree.trace` can trace this pure function.

        Args:
            tensors: Stored tensors by key; those that belong to no weight of this form are left out.
            dtype: Dtype of the weights, which are computed in float32 and rounded once.

        Raises:
            ShapeError: tensors of one weight have other shapes or dtypes than the form says; the error names all of
                them.

        Examples:
            >>> from shardtree.quantised import FORMS
            >>> values = torch.full((256, 128), 3.0).to(torch.float8_e4m3fn)
            >>> weights = FORMS["fp8_blocks"].dequantise({"w": values, "w_scale_inv": torch.tensor([[1.0], [0.5]])})
            >>> weights["w"][[0, 255], 0].tolist()
            [3.0, 1.5]
        """
        weights = {}
        for key, names in self.found(tensors).items():
            shape = self._turn(self.shape_of(key, tensors))
            box = Box((0,) * len(shape), shape)
            parts = self._parts(shape)
            weights[key] = self._turn_tensor(
                decoded(key, parts, self.join, [tensors[name] for name in names], box, dtype)
            )
        return weights

    def quantise(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return weights quantised to this form: their stored tensors by key.

        Each number is rounded to the nearest, ties to even. Numbers close to the largest float32 number are clipped
        before, so that none is rounded to infinity. For weights on torch's meta device, the stored tensors are on the
        meta device, too.

        Args:
            tensors: Weights by key.

        Raises:
            ShapeError: the form can only be read, or a weight isn't made of matrices.
            UnsupportedValue: an element isn't finite, or is complex.

        Examples:
            >>> from shardtree.quantised import FORMS
            >>> stored = FORMS["fp8_rows"].quantise({"w": torch.tensor([[1.0, -3.5], [0.25, 0.0]])})
            >>> stored["w"].float()[0].tolist(), stored["w_scale"].shape
            ([128.0, -448.0], torch.Size([2, 1]))
        """
        self.check_made("quantise")
        weights = [self.lens(ShardedTensor.from_rank_offsets(key, tensor)).shards for key, tensor in tensors.items()]
        return {part.key: part.data for parts in weights for part in parts}

    def check_made(self, doing: str) -> None:
        """Raise unless weights can be written in this form.

        Raises:
            ShapeError: the form can only be read.
        """
        if self.encode is None:
            fix = "Quantise with a program that writes this format, or choose a Form such as FORMS['fp8_blocks']."
            raise ShapeError(error_text(f"{doing}: {self.name} can be read, but not written", fix=fix))

    # Boxes of weights, in any layout.

    def lens(self, shard: ShardedTensor) -> StoredForm:
        """Return the stored form of a shard that the model holds unquantised: shards of values, scales and so on.

        This method is a lens: it can be passed to `as_factory`. Only scales that the shard's elements need are loaded.
        Any box can be loaded, even one whose edge cuts a block. Only a box of whole blocks can be saved: otherwise, the
        stored shards have no data, which a save refuses. A load doesn't read the shard's elements; the stored shards
        get memory of their own.

        Raises:
            ShapeError: the shard is a flat range, has fewer than two axes or sets `allow_shape_mismatch`; or an axis of
                the weight isn't a multiple of the number of values that are packed into one stored element.
            UnsupportedValue: an element isn't finite, or the weight's numbers are complex.

        Examples:
            >>> from shardtree.quantised import FORMS
            >>> weight = ShardedTensor.from_rank_offsets("w", torch.ones(128, 256), (0, 1, 2))
            >>> for part in FORMS["fp8_blocks"].lens(weight).shards:
            ...     print(part.key, part.dtype, part.global_offset, part.local_shape)
            w torch.float8_e4m3fn (128, 0) (128, 256)
            w_scale_inv torch.float32 (1, 0) (1, 2)
        """
        if shard.dtype.is_complex:
            fix = "Store real and imaginary parts as separate weights."
            raise UnsupportedValue(error_text(f"quantised: {shard.key!r} is complex", found=shard.dtype, fix=fix))
        box, whole = self._box_of(shard)
        parts = self._parts(whole)
        data, pieces = self._quantise(shard, box, whole), [part.pieces(*box) for part in parts]
        rows = zip(self.keys(shard.key), parts, pieces, data, strict=True)
        shards = [
            owned(shard_of(shard, key, part, inner, whole, _data_for(shard, part, inner, elements)), is_own)
            for key, part, boxes, elements in rows
            for inner, is_own in boxes
        ]

        def merge(values: Sequence[Any]) -> Any:
            remaining = iter(values)
            tensors = [
                joined(boxes, list(islice(remaining, len(boxes)))).reshape(part.box(*box).shape)
                for part, boxes in zip(parts, pieces, strict=True)
            ]
            return self._turn_tensor(self._decode(shard, parts, tensors, box)).reshape(shard.local_shape)

        return StoredForm(tuple(shards), merge)

    def shards(self, shard: ShardedTensor, tensors: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the leaves of a weight that the model holds quantised, by key.

        Each stored tensor is cut where the weight is cut.

        Args:
            shard: Shard of the weight, which must be a box; its data and dtype are ignored.
            tensors: This rank's values, scales and so on, by key; None for a target without memory.

        Returns:
            A shard for each stored tensor; or a factory if an edge of the box cuts a block. Such a block's scale is
            stored by the rank that has the block's first element, and loaded by every rank that needs it.

        Raises:
            ShapeError: a tensor is cut differently from the weight, or an edge cuts through a stored element.

        Examples:
            >>> from shardtree.quantised import FORMS
            >>> weight = ShardedTensor.from_rank_offsets("w", torch.empty(64, 256), (0, 1, 4))  # of 256 rows
            >>> scale = FORMS["fp8_blocks"].shards(weight)["w_scale_inv"]
            >>> [(part.global_offset, part.replica_id) for name, part in scale.build().items() if name != "merge"]
            [((0, 0), 1)]
        """
        box, whole = self._box_of(shard)
        if not is_of_blocks(box, whole, self.parts[0].steps):
            heading = f"quantised: {shard.key!r} is cut between values that share one stored element"
            multiples = " and ".join(map(str, self.parts[0].steps))
            found, expected = f"shape {box.shape} at {box.offset}", f"multiples of {multiples} along the last two axes"
            raise ShapeError(error_text(heading, found=found, expected=expected, fix="Cut at such multiples."))
        leaves, wrong = dict[str, Any](), []
        for key, part in zip(self.keys(shard.key), self._parts(whole), strict=True):
            pieces, data = part.pieces(*box), None if tensors is None else tensors[key]
            outer = shard_of(shard, key, part, part.box(*box), whole, None)
            if data is not None:
                if tuple(data.shape) != outer.local_shape or data.dtype not in part.dtypes:
                    wrong.append(f"{key!r}: {data.dtype} {tuple(data.shape)}, not {part.dtypes[0]} {outer.local_shape}")
                    continue
                outer = replace(outer, data=data, dtype=data.dtype)
            is_alone = len(pieces) == 1 and pieces[0][1]
            leaves[key] = outer if is_alone else as_factory(outer, partial(in_pieces, pieces=pieces))
        if wrong:
            heading = "quantised: tensors whose shape or dtype does not fit the shard of their weight"
            fix = "Pass the values and scales of exactly those elements that the shard of the weight covers."
            raise ShapeError(error_text(heading, offenders=wrong, fix=fix))
        return leaves

    def _box_of(self, shard: ShardedTensor) -> tuple[Box, tuple[int, ...]]:
        """Return a shard's box in the weight's stored matrices, and their whole shape."""
        local = (*(1,) * shard.prepend_axis_num, *shard.local_shape)
        axes = len(shard.local_shape) if self.is_turned else len(local)  # the last two are turned
        if axes < 2 or shard.flattened_range is not None or shard.allow_shape_mismatch:
            kind, fix = "allow_shape_mismatch=True", "Leave out allow_shape_mismatch."
            if shard.flattened_range is not None:
                kind, fix = "a flat range", "Pass `as_factory(shard, form.lens)` with the unquantised weight's shard."
            elif axes < 2:
                kind, fix = "fewer than two axes", "Leave this tensor unquantised."
            found = f"{kind}: local shape {shard.local_shape}, global shape {shard.global_shape}"
            heading = f"quantised: {shard.key!r} cannot be stored as {self.name}"
            raise ShapeError(error_text(heading, found=found, expected="a box of a matrix", fix=fix))
        whole, pack = self._turn(shard.global_shape), self.parts[0].pack
        if any(size % step for size, step in zip(whole[-2:], pack, strict=True)):
            heading = f"quantised: {shard.key!r} cannot be stored as {self.name}"
            raise ShapeError(error_text(heading, found=whole, expected=f"multiples of {pack} along the last axes"))
        return Box(self._turn(shard.global_offset), self._turn(local)), whole

    def _parts(self, whole: Sequence[int]) -> list[Part]:
        return [part.of(whole) for part in self.parts]

    def _decode(self, shard: ShardedTensor, parts: Sequence[Part], tensors: Sequence[Any], box: Box) -> Any:
        """Return a box of a weight, oriented as stored, decoded from its stored tensors; lazy if one of these is lazy.

        Args:
            shard: Shard of the weight, for its key and dtype.
            parts: Descriptions of the stored tensors.
            tensors: Box of each stored tensor that `box` needs.
            box: Box of the weight, oriented as stored.
        """
        key, dtype = shard.key, shard.dtype
        if not any(isinstance(tensor, LazyTensor) for tensor in tensors):
            return decoded(key, parts, self.join, tensors, box, dtype)
        bases = [part.box(*box).offset for part in parts]

        def recipe(inner: Box) -> Recipe:
            place = Box(tuple(map(sum, zip(box.offset, inner.offset, strict=True))), inner.shape)
            boxes = (inside(part.box(*place), base) for part, base in zip(parts, bases, strict=True))

            def make(read: Iterator[torch.Tensor]) -> torch.Tensor:
                return decoded(key, parts, self.join, list(read), place, dtype)

            return zip(tensors, boxes, strict=True), make

        identify = partial(self._made_of, f"dequantise {box}", *tensors)
        return of_source(Boxwise(f"{self.name} of {tensors[0].name}", box.shape, dtype, recipe, identify))

    def _quantise(self, shard: ShardedTensor, box: Box, whole: Sequence[int]) -> list[Any]:
        """Return a shard's data for each stored tensor (values, scales and so on); lazy if the shard's data are lazy.

        All are None if the form can only be read, the shard has no elements to read, or its box cuts a block.
        `box` and `whole` are the result of `_box_of`.
        """
        is_memory = isinstance(shard.data, torch.Tensor) and has_no_elements(shard.data)
        if shard.data is None or self.encode is None or is_memory or not is_of_blocks(box, whole, self.block):
            return [None] * len(self.parts)
        matrix = self._turn_tensor(shard.data.reshape(self._turn(box.shape)))
        return [self._quantise_part(shard.key, number, matrix) for number in range(len(self.parts))]

    def _quantise_part(self, key: str, number: int, matrix: Any) -> Any:
        part, shape = self.parts[number], tuple(matrix.shape)
        zeros = (0,) * len(shape)
        outer = part.box(zeros, shape)  # counted from the beginning of the box, where a block begins, too

        def recipe(inner: Box) -> Recipe:
            blocks = blocks_of(part, self.block, shape, inner)

            def make(read: Iterator[torch.Tensor]) -> torch.Tensor:
                assert self.encode is not None
                return encoded(key, part, number, self.block, self.encode, next(read), blocks, inner)

            return [(matrix, blocks)], make

        if isinstance(matrix, torch.Tensor):
            return recipe(outer)[1](iter([matrix]))
        identify = partial(self._made_of, f"quantise {number}", matrix)
        return of_source(Boxwise(f"{matrix.name} as {self.name}", outer.shape, part.dtypes[0], recipe, identify))

    def _turn(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Convert a shape or offset between the weight and its stored matrices: `is_turned` swaps the last two axes."""
        return (*shape[:-2], shape[-1], shape[-2]) if self.is_turned else tuple(shape)

    def _turn_tensor(self, tensor: Any) -> Any:
        return tensor.transpose(-1, -2) if self.is_turned else tensor

    def _made_of(self, doing: str, *lazies: LazyTensor) -> tuple[Any, ...] | None:
        """Return the identity of a lazy tensor that this form computes from others, or None if it is unknown.

        The identity is equal in all processes and differs between forms. It is unknown if a function of the form isn't
        from this library, since another process may have another function of the same name.
        """
        functions = [self.join, self.encode, *(part.read for part in self.parts)]
        modules = [str(getattr(function, "__module__", None)) for function in functions if function is not None]
        if not all(module.startswith("shardtree.") for module in modules):
            return None
        parts = [
            (part.name, part.dtypes, part.per, part.pack, part.tail, part.group, part.shape) for part in self.parts
        ]
        names = [function and function.__qualname__ for function in functions]
        return str((doing, self.name, self.base, self.is_turned, self.block, names, parts)), *lazies


def _data_for(shard: ShardedTensor, part: Part, box: Box, data: Any) -> Any:
    """Return `data`, the elements of a box of a stored tensor, in the local shape of the shard that stores them.

    If the elements of `shard`, the weight's shard, must not be read, as in a load, the result is new memory instead.
    """
    shape = box.shape if part.per is None else box.shape[shard.prepend_axis_num :]
    if isinstance(shard.data, torch.Tensor) and has_no_elements(shard.data):
        return memory_beside(shard.data, shape, part.dtypes[0])
    return None if data is None else data.reshape(shape)
