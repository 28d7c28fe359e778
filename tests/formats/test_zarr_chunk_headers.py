"""Chunks whose header says more than there is, in a process of its own: a decoder that believed it could crash."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from struct import pack
from typing import Any

import numpy as np
import pytest
import torch

import shardtree as st
from shardtree.errors import CorruptCheckpoint, UnsupportedValue
from shardtree.storage import MemoryStorage
from tests.formats.zarr_nodes import LITTLE, V2_GROUP, V3_GROUP, encoded, v2_node, v3_node
from tests.quick_python.command import quick_python
from tests.shell.table.folders import folder_of

numcodecs = pytest.importorskip("numcodecs")

N = 4000
BLOSC = {"name": "blosc", "configuration": {"cname": "lz4", "clevel": 1, "shuffle": "noshuffle", "typesize": 1}}
CRC = {"name": "crc32c"}


def v3_files(chunk: bytes, codecs: list[Any], dtype: str = "uint8", count: int = N) -> dict[str, bytes]:
    array = encoded(v3_node([count], [count], dtype, codecs=codecs))
    return {"zarr.json": V3_GROUP, "w/zarr.json": array, "w/c/0": chunk}


def v2_files(
    chunk: bytes, compressor: Any, filters: Any = None, dtype: str = "|u1", count: int = N
) -> dict[str, bytes]:
    array = v2_node([count], [count], dtype, fill_value=0, compressor=compressor, filters=filters)
    return {".zgroup": V2_GROUP, "w/.zarray": encoded(array), "w/0": chunk}


def blosc(length: int, *, flags: int = 2, block: int | None = None, packed: int | None = None) -> bytes:
    block = length if block is None else block
    return pack("<BBBBIII", 2, 1, flags, 1, length, block, length + 16 if packed is None else packed)


def sharded(inner: bytes, codecs: list[Any], endian: str = "little", count: int = N) -> tuple[bytes, list[Any]]:
    """Return a file of one inner chunk, with its index, and the codecs of the array."""
    order = "<" if endian == "little" else ">"
    index = [{"name": "bytes", "configuration": {"endian": endian}}]
    codec = {"chunk_shape": [count], "codecs": codecs, "index_codecs": index}
    data = inner + pack(f"{order}QQ", 0, len(inner))
    return data, [{"name": "sharding_indexed", "configuration": codec}]


def hostile() -> Iterator[tuple[str, dict[str, bytes]]]:
    plain = {"id": "blosc"}
    turned = {"name": "transpose", "configuration": {"order": [0]}}
    for length in (N, 1_000_000):
        yield f"blosc v3 {length}", v3_files(blosc(length), [LITTLE, BLOSC], count=length)
        yield f"blosc v2 {length}", v2_files(blosc(length), plain, count=length)
        data, codecs = sharded(blosc(length), [LITTLE, BLOSC], count=length)
        yield f"inner blosc {length}", v3_files(data, codecs, count=length)
        yield f"inner blosc behind a transposition {length}", v3_files(data, [turned, *codecs], count=length)
        data, codecs = sharded(blosc(length), [LITTLE, BLOSC], endian="big", count=length)
        yield f"inner blosc by a big-endian index {length}", v3_files(data, codecs, count=length)
        # What is read as the header would be sound, were it the checksum that comes first.
        shifted = pack("<I", 0) + blosc(length)
        yield f"blosc after its checksum {length}", v2_files(shifted, {"id": "crc32c", "location": "start"}, [plain])
    yield "blosc of blocks", v2_files(blosc(N, flags=0, block=1, packed=16), plain)
    yield "blosc packed to nothing", v2_files(blosc(N, packed=0), plain)
    yield "blosc of negative length", v2_files(blosc(2**32 - 16, packed=16), plain, count=2**32 - 16)
    yield "blosc without a whole header", v2_files(blosc(N)[:15], plain)
    yield "lz4 of nothing", v2_files(pack("<I", N), {"id": "lz4"})
    yield "lz4 of a header's half", v2_files(b"\0\0", {"id": "lz4"})
    yield "zstd of blocks that are not there", v2_files(bytes.fromhex("28b52ffd60a00f0000ff"), {"id": "zstd"})
    yield "zstd of nothing", v2_files(b"", {"id": "zstd"})


HOSTILE = dict(hostile())


def test_a_chunk_that_says_more_than_there_is_never_reaches_its_decoder(tmp_path: Path) -> None:
    names = list(HOSTILE)
    for number, files in enumerate(HOSTILE.values()):
        for name, data in files.items():
            path = tmp_path / str(number) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    script = """if True:
        import sys, shardtree as st
        for number in range(int(sys.argv[2])):
            place = f"{sys.argv[1]}/{number}"
            for call in (st.load_plain_tensors, lambda at: st.convert(at, place + "-copy", backend=("safetensors", 1))):
                try:
                    call(place)
                    print(number, "loaded")
                except st.CheckpointingException as error:
                    assert place in str(error), error
            print(number, "verified", len(st.verify(place, report=print)))
    """
    found = subprocess.run(
        [*quick_python(), "-c", script, str(tmp_path), str(len(names))],
        capture_output=True, text=True, check=False, env=os.environ | {"PYTHONWARNINGS": "ignore"},
    )  # fmt: skip
    assert found.returncode == 0, f"ended by {found.returncode}: {found.stderr[-2000:]}"
    lines = found.stdout.splitlines()
    assert not [names[int(line.split()[0])] for line in lines if line.endswith("loaded")]
    # What no codec of ours reads may be what was saved; everything else is damage.
    clean = [names[int(line.split()[0])] for line in lines if line.endswith("verified 0")]
    assert all("transposition" in name or "big-endian" in name or "after its checksum" in name for name in clean)


RAW: dict[str, tuple[Any, str]] = {
    "float16": (np.arange(300, dtype="<f2"), "<f2"),
    "bytes of an fp8": (np.random.default_rng(0).integers(0, 256, 500).astype("u1"), "|u1"),
    "a small chunk": (np.arange(3, dtype="<f4"), "<f4"),
}
COMPRESSORS = {
    "blosc": lambda: numcodecs.Blosc(),
    "blosc by zstd": lambda: numcodecs.Blosc(cname="zstd", clevel=9),
    "lz4": lambda: numcodecs.LZ4(),
    "zstd": lambda: numcodecs.Zstd(checksum=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("compressor", COMPRESSORS)
@pytest.mark.parametrize("name", RAW)
def test_an_honest_chunk_that_is_cut_is_damage_everywhere(name: str, compressor: str) -> None:
    values, dtype = RAW[name]
    codec = COMPRESSORS[compressor]()
    whole = bytes(codec.encode(values))
    stored = v2_files(whole, codec.get_config(), dtype=dtype, count=len(values))
    assert np.array_equal(st.load_plain_tensors(folder_of(stored))["w"].numpy(), values)
    assert not st.verify(folder_of(stored))
    for length in (0, 3, 15, len(whole) // 2, len(whole) * 3 // 4, len(whole) - 1):
        cut = folder_of(stored | {"w/0": whole[:length]})
        with pytest.raises(CorruptCheckpoint, match="w/0"):
            st.load_plain_tensors(cut)
        with pytest.raises(CorruptCheckpoint, match="w/0"):
            st.convert(cut, MemoryStorage(), backend=("safetensors", 1))
        (damage,) = st.verify(cut)
        assert damage.keys == ("w",)


def zstd_frame(blocks: int) -> bytes:
    """Return a frame that doesn't say its length: the same byte 131,072 times a block, in four bytes."""
    repeated = pack("<I", 131072 << 3 | 2)[:3] + b"\0"
    return bytes.fromhex("28b52ffd0058") + repeated * blocks + bytes.fromhex("010000")


SKIPPED = pack("<II", 0x184D2A50, 4) + b"text"


@pytest.mark.parametrize(
    "first", [lambda: zstd_frame(0), lambda: bytes(numcodecs.Zstd().encode(b"short")), lambda: SKIPPED]
)
def test_a_second_zstd_frame_counts_too(first: Callable[[], bytes]) -> None:
    bomb = first() + zstd_frame(4096)
    with pytest.raises(CorruptCheckpoint, match="more bytes than a chunk has"):
        st.load_plain_tensors(folder_of(v2_files(bomb, {"id": "zstd"})))


def test_frames_of_zstd_that_follow_each_other_load() -> None:
    values = np.arange(N, dtype="u1")
    frames = SKIPPED + b"".join(bytes(numcodecs.Zstd().encode(half)) for half in (values[:7], values[7:]))
    loaded = st.load_plain_tensors(folder_of(v2_files(frames, {"id": "zstd"})))
    assert torch.equal(loaded["w"], torch.from_numpy(values))


def test_a_checksum_before_the_chunk_is_refused_whichever_file_says_so() -> None:
    for where in ({"location": "start"}, {"configuration": {"location": "start"}}):
        with pytest.raises(UnsupportedValue, match=r"codec 'crc32c': \w+ 'location'"):
            st.load_plain_tensors(folder_of(v3_files(blosc(N), [LITTLE, BLOSC, CRC | where])))
    other = {"name": "numcodecs.crc32c", "configuration": {"location": "start"}}
    with pytest.raises(UnsupportedValue, match="begins with its checksum"):
        st.load_plain_tensors(folder_of(v3_files(blosc(N), [LITTLE, BLOSC, other])))
