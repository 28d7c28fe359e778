"""What a fuzzed input replaces: one file of a checkpoint, or a part of one, with checksums that fit."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any, Literal

from torch.distributed.checkpoint.filesystem import _StorageInfo

from shardtree.core.codec import HeaderEntry, decode_header, encode_header, parse_json
from shardtree.errors import CheckpointingException
from shardtree.formats.archives._zip import append, directory
from shardtree.shell.storage import BLOCK_BYTES, digest
from shardtree.shell.table._metadata import encode_metadata
from shardtree.shell.table.index import Index, decode_index, encode_index

from . import seeds
from .seeds import Files

Kind = Literal["bytes", "json", "header", "integers", "pickle"]


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in a checkpoint that takes any bytes.

    Attributes:
        name: what it is, for people.
        kind: what its bytes are, for who changes them.
        seed: what is there in a sound checkpoint.
        files: the checkpoint with given bytes in that place, and checksums that fit them.
    """

    name: str
    kind: Kind
    seed: bytes
    files: Callable[[bytes], Files]


FORMATS: dict[str, Callable[[], list[Files]]] = {
    "safetensors": seeds.native,
    "torch_dist": seeds.torch_dist,
    "dcp": seeds.dcp,
    "torch": seeds.torch_common,
    "zarr": seeds.zarr,
    "huggingface": seeds.huggingface,
    "dcp_safetensors": seeds.dcp_safetensors,
    "deepspeed": seeds.deepspeed,
    "universal": seeds.universal,
    "dtensor_files": seeds.dtensor_files,
    "torch_checkpointing": seeds.torch_checkpointing,
}

WANTED = {
    "torch": ("common.pt", "metadata.json"),
    "torch_dist": (".metadata", "common.pt", "metadata.json", "__0_0.distcp"),
    "torch_checkpointing": ("metadata.pkl", "model_0.pt"),
    "dcp_safetensors": ("shard-",),
    "universal": ("mp_rank_00_model_states.pt", "zero/optimizer_state.pt", "zero/emb.weight/"),
}
"""How the names of the places begin that a format is about, where not all of them are."""


@cache
def slots(name: str) -> tuple[Slot, ...]:
    """Return the places of a format's checkpoints that inputs replace; an input's first byte is one's number."""
    found = [slot for base in FORMATS[name]() for slot in _slots(base)]
    wanted = WANTED.get(name, ("",))
    found = [slot for slot in found if slot.name.startswith(wanted)]
    assert len(found) < 256
    return tuple(found)


def checkpoint_of(name: str, data: bytes) -> Files:
    """Return the checkpoint that an input stands for."""
    places = slots(name)
    return places[(data[0] if data else 0) % len(places)].files(data[1:])


def _slots(base: Files) -> Iterator[Slot]:
    for name, data in base.items():
        yield Slot(name, _kind(name, data), data, partial(_replaced, base, name))
        if data[:4] == b"PK\3\4" and name.endswith(".pt"):
            yield from _records(data, lambda made, name=name: base | {name: made}, name)
    if "digest" in base.get("metadata.json", b"").decode():
        yield Slot("metadata.json, sealed", "json", base["metadata.json"], partial(_with_fields, base))
        yield from _sealed(base)
    if ".metadata" in base and b"megatron" not in base[".metadata"]:
        yield from _payloads(base)


def _kind(name: str, data: bytes) -> Kind:
    if name.endswith((".json", ".zarray", ".zattrs", ".zgroup")):
        return "json"
    if data[8:9] == b"{":
        return "header"
    return "pickle" if name in (".metadata", "metadata.pkl") else "bytes"


def _replaced(base: Files, name: str, data: bytes) -> Files:
    files = base | {name: data}
    return files if name == "metadata.json" or "metadata.json" not in base else sealed(files)


def sealed(files: Files) -> Files:
    """Return a checkpoint with hashes and lengths in metadata.json that fit its files."""
    fields = json.loads(files["metadata.json"])
    for entry in fields.values():
        if isinstance(entry, dict) and entry.get("name") in files:
            data = files[entry["name"]]
            entry |= {"length": len(data), "digest": digest(data)}
    return files | ({"metadata.json": encode_metadata(fields)} if "digest" in fields else {})


def _with_fields(base: Files, data: bytes) -> Files:
    """Return a checkpoint whose metadata.json says something else, under a hash that fits."""
    try:
        fields = parse_json(data, "")
        return base | {"metadata.json": encode_metadata(fields)}
    except (CheckpointingException, AttributeError):
        return base | {"metadata.json": data}


def _sealed(base: Files) -> Iterator[Slot]:
    fields = json.loads(base["metadata.json"])
    index = fields["index"]["name"]
    if index.endswith(".safetensors"):
        yield Slot("index, columns", "integers", _columns(base[index]), partial(_with_columns, base, index))
        columns = decode_index(memoryview(base[index]), "")
        yield from _data_files(base, index, columns)
    common = fields.get("common", {}).get("name")
    if common in base:
        structure, rest = _structure(base[common])
        make = partial(_with_structure, rest)
        yield Slot("common, structure", "json", structure, lambda data: _replaced(base, common, make(data)))


def _columns(data: bytes) -> bytes:
    return data[decode_header(data, len(data))[1] :]


def _with_columns(base: Files, name: str, data: bytes) -> Files:
    """Return a checkpoint whose index has the columns of the sound one with other numbers in them."""
    whole = base[name]
    start = decode_header(whole, len(whole))[1]
    rest = data[: len(whole) - start]
    return _replaced(base, name, whole[:start] + rest + whole[start + len(rest) :])


def _data_files(base: Files, index: str, columns: Index) -> Iterator[Slot]:
    starts = columns.file_start.tolist()
    names = [bytes(columns.file_text[begin:end]).decode() for begin, end in pairwise(starts)]
    for number, name in enumerate(names):
        if int(columns.file_length[number]) <= BLOCK_BYTES:
            make = partial(_with_data_file, base, index, columns, number, name)
            yield Slot(f"{name}, hashed", "header", base[name], make)


def _with_data_file(base: Files, index: str, columns: Index, number: int, name: str, data: bytes) -> Files:
    """Return a checkpoint with another data file, and the hash of its only block in the index."""
    whole = data[:BLOCK_BYTES].ljust(int(columns.file_length[number]), b"\0")[: int(columns.file_length[number])]
    hashes = columns.block_hash.copy()
    hashes[columns.file_block[number]] = int(digest(whole), 16)
    return sealed(base | {name: whole, index: encode_index(replace(columns, block_hash=hashes))})


def _structure(data: bytes) -> tuple[bytes, list[tuple[HeaderEntry, bytes]]]:
    entries, start = decode_header(data, len(data))
    parts = [(entry, data[start + entry.start : start + entry.stop]) for entry in entries]
    (structure,) = (part for entry, part in parts if entry.name == "structure")
    return structure, [(entry, part) for entry, part in parts if entry.name != "structure"]


def _with_structure(rest: list[tuple[HeaderEntry, bytes]], structure: bytes) -> bytes:
    """Return the file of a common state with another structure."""
    parts = [*rest, (HeaderEntry("structure", "U8", (len(structure),), 0, 0), structure)]
    entries, at = [], 0
    for entry, part in parts:
        entries.append(entry._replace(start=at, stop=at + len(part)))
        at += len(part)
    return encode_header(entries) + b"".join(part for _, part in parts)


def _records(archive: bytes, files: Callable[[bytes], Files], name: str) -> Iterator[Slot]:
    """Yield a slot for each record of an archive: the archive is made anew around it, with CRCs that fit."""
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        held = {record.partition("/")[2]: opened.read(record) for record in opened.namelist()}
    for record, data in held.items():
        if record in ("data.pkl", "byteorder", "data/0"):

            def make(data: bytes, record: str = record) -> Files:
                return files(archived(held | {record: data}))

            yield Slot(f"{name}, {record}", "pickle" if record == "data.pkl" else "bytes", data, make)


def archived(records: dict[str, bytes]) -> bytes:
    """Return records as torch.save's archive of them."""
    out, written = bytearray(), []
    for name, data in records.items():
        append(out, 0, written, name, data)
    return bytes(out) + directory(written, len(out))


def _payloads(base: Files) -> Iterator[Slot]:
    """Yield slots for the archives inside .distcp files: .metadata says then how long they are."""
    metadata = pickle.loads(base[".metadata"])
    for place, at in list(metadata.storage_data.items())[:4]:
        file = base[at.relative_path]
        payload = file[at.offset : at.offset + at.length]
        make = partial(_with_payload, base, metadata, place)
        if payload[:4] == b"PK\3\4":
            yield from _records(payload, make, f"{at.relative_path} at {at.offset}")
        else:
            yield Slot(f"{at.relative_path} at {at.offset}", "bytes", payload, make)


def _with_payload(base: Files, metadata: Any, place: Any, payload: bytes) -> Files:
    at = _StorageInfo("__9_0.distcp", 0, len(payload))
    moved = replace(metadata, storage_data=metadata.storage_data | {place: at})
    return base | {".metadata": pickle.dumps(moved, 4), "__9_0.distcp": payload}


def seed_inputs(name: str) -> Iterator[tuple[str, bytes]]:
    """Yield a name and an input for each slot of a format: the checkpoint that was saved, unchanged."""
    for number, slot in enumerate(slots(name)):
        yield f"{number:03d}", bytes([number]) + slot.seed
