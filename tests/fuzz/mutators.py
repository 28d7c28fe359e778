"""Changes to inputs that know what they change: JSON, headers, columns of integers, pickles."""

from __future__ import annotations

import json
import pickletools
import struct
from collections.abc import Callable
from random import Random
from typing import Any

from .slots import slots

Change = Callable[[bytes, Random], bytes]

NUMBERS = (0, 1, -1, 2, 3, 5, 8, 255, 256, 2**16, 2**20, 2**31 - 1, 2**31, 2**32, 2**40, 2**53)
NUMBERS += (2**60, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**31), -(2**63), 10**30, 10**400)
TEXTS = (
    *("", "../x", "/etc/passwd", "a\0b", "\ud800", ".", "x" * 300, "__metadata__", "$", "pickle", "object", "float32"),
    *("F32", "U8", "I64", "int4", "|O", "<f4", "<U1", "os.system", "cuda:0", "structure", "0", "1", "digest"),
)
ATOMS = (None, True, False, 0.5, -0.0, 1e300, *NUMBERS, *TEXTS, [], {}, [0], {"$": "hole"}, {"$": "tuple", "items": []})
DEEP = (10, 99, 101, 300, 2_000, 100_000)


def changed(name: str, data: bytes, random: Random, otherwise: Change) -> bytes:
    """Return an input of a format, changed as what it holds suggests.

    Args:
        name: of the format.
        data: the input.
        random: says which of the changes.
        otherwise: changes bytes of which nothing is known; half of the time also others.
    """
    places = slots(name)
    if not data or random.random() < 0.02:
        number = random.randrange(len(places))
        return bytes([number]) + places[number].seed
    number, body = data[0] % len(places), data[1:]
    change = otherwise if random.random() < 0.4 else BY_KIND.get(places[number].kind, otherwise)
    try:
        return bytes([number]) + change(body, random)
    except (ValueError, RecursionError, IndexError, TypeError, struct.error):
        return bytes([number]) + otherwise(body, random)


def change_bytes(data: bytes, random: Random) -> bytes:
    """Return bytes of which a few are others, more or fewer."""
    made = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 8))):
        at = random.randrange(len(made) + 1)
        step = random.randrange(5)
        if step == 0:
            made[at : at + 1] = bytes([random.randrange(256)])
        elif step == 1:
            made[at : at + 1] = bytes([(made[at] if at < len(made) else 0) ^ 1 << random.randrange(8)])
        elif step == 2:
            del made[at : at + random.choice((1, 4, 64, len(made)))]
        elif step == 3:
            made[at:at] = bytes(random.randrange(256) for _ in range(random.choice((1, 4))))
        else:
            end = random.randrange(len(made) + 1)
            made[at:at] = made[min(at, end) : max(at, end)][:200]
    return bytes(made)


def change_integers(data: bytes, random: Random) -> bytes:
    """Return columns of 8-byte integers with other numbers in a few rows."""
    made = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 4))):
        at = random.randrange(max(len(made) // 8, 1)) * 8
        old = int.from_bytes(made[at : at + 8], "little", signed=True)
        values = (random.choice(NUMBERS), old + random.choice((-1, 1, 2, -8, 64)), old * 2, -old, random.randrange(64))
        made[at : at + 8] = (random.choice(values) % 2**64).to_bytes(8, "little")
    return bytes(made)


def change_json(data: bytes, random: Random) -> bytes:
    """Return JSON with other values, members that are twice there, or much nesting."""
    step = random.random()
    value = [json.loads(data)]
    if step < 0.05:
        return _nested(data, random)
    for _ in range(random.choice((1, 1, 2, 4))):
        _change_value(value, random)
    made = json.dumps(value[0]).encode()
    return made.replace(b"{", b"{" + _member(made, random) + b",", 1) if step < 0.08 else made


def _member(text: bytes, random: Random) -> bytes:
    names = [part for part in text.split(b'"') if part.isalnum()]
    return b'"' + random.choice(names or [b"a"]) + b'":1'


def _nested(data: bytes, random: Random) -> bytes:
    opening, closing = random.choice(((b"[", b"]"), (b'{"a":', b"}"), (b'{"$":"tuple","items":[', b"]}")))
    depth, at = random.choice(DEEP), random.randrange(len(data) + 1)
    return data[:at] + opening * depth + b"1" + closing * depth + data[at + 1 :]


def _change_value(value: Any, random: Random) -> None:
    """Change something in a JSON container in place."""
    holder, name = _place(value, random)
    step = random.randrange(6)
    if step == 0:
        del holder[name]
        if not value:
            value.append(None)
    elif step == 1:
        holder[name] = [holder[name], holder[name]]
    elif step == 2:
        other, where = _place(value, random)
        holder[name] = json.loads(json.dumps(other[where]))
    elif step == 3 and isinstance(holder, dict):
        holder[random.choice(TEXTS)] = holder[name]
    elif type(holder[name]) is int:
        holder[name] = random.choice((holder[name] + random.choice((-1, 1, 8)), random.choice(NUMBERS), -holder[name]))
    else:
        holder[name] = random.choice(ATOMS)


def _place(value: Any, random: Random) -> tuple[Any, Any]:
    """Return a container and a name or number in it, somewhere in a value."""
    holder, name = value, 0
    while isinstance(holder[name], list | dict) and holder[name] and random.random() < 0.8:
        holder = holder[name]
        name = random.choice(list(holder)) if isinstance(holder, dict) else random.randrange(len(holder))
    return holder, name


def change_header(data: bytes, random: Random) -> bytes:
    """Return a safetensors file with another header, of the right length most of the time; seldom with other data."""
    length = min(int.from_bytes(data[:8], "little"), len(data))
    text, rest = data[8 : 8 + length], data[8 + length :]
    if random.random() < 0.2:
        return data[: 8 + length] + change_integers(rest, random)
    made = change_json(text, random).ljust(length)
    said = len(made) if random.random() < 0.9 else random.choice(NUMBERS) % 2**64
    return said.to_bytes(8, "little") + made + rest


# Opcodes with arguments that hurt where they are believed.
SNIPPETS = (
    b"cos\nsystem\n",
    b"cbuiltins\neval\n",
    b"cnumpy\nload\n",
    b"ctorch\nload\n",
    b"ctorch._utils\n_rebuild_tensor_v2\n",
    b"ccollections\nOrderedDict\n",
    b"c_codecs\nencode\n",
    b"\x8c\x02os\x8c\x06system\x93",
    b"X\x04\x00\x00\x00echo\x85R",
    b"\x8a\xff" + b"\xff" * 255,
    b"\x8b\xff\xff\xff\x7f",
    b"B\xff\xff\xff\x7f",
    b"\x8e" + b"\xff" * 8,
    b"\x95" + b"\xff" * 8,
    b"r\xff\xff\xff\x7f0",
    b"j\xff\xff\xff\x7f",
    b"\x97\x98",
    b"(" * 50,
    b"]" * 50,
    b"2" * 50,
    b"\x85" * 200,
    b"K\x01\x85R",
    b"}b",
    b")R",
    b")\x81",
    b"N",
    b"\x88",
    b"Q",
    b"\x94h\x00",
    b"h\x00h\x00",
    b"q\x00",
    b"I99999999999999999999\n",
    b"F1e999\n",
    b"\x8f",
    b"]h\x00a",
)


def change_pickle(data: bytes, random: Random) -> bytes:
    """Return a pickle with opcodes that are gone, twice there, swapped or new, or with another number in one."""
    ops = [(op, argument, at) for op, argument, at in pickletools.genops(data) if at is not None]
    edges = [at for *_, at in ops] + [len(data)]
    made = bytearray(data)
    first = random.randrange(len(ops))
    last = min(first + random.choice((1, 1, 2, 6)), len(ops))
    begin, end = edges[first], edges[last]
    step = random.randrange(5)
    if step == 0:
        del made[begin:end]
    elif step == 1:
        made[end:end] = made[begin:end] * random.choice((1, 1, 3, 100))
    elif step == 2:
        at = edges[random.randrange(len(edges))]
        made[at:at] = data[begin:end]
    elif step == 3:
        made[begin:begin] = random.choice(SNIPPETS)
    else:
        made[begin : edges[first + 1]] = _other_argument(*ops[first][:2], bytes(data[begin : edges[first + 1]]), random)
    return bytes(made)


def _other_argument(op: Any, argument: Any, old: bytes, random: Random) -> bytes:
    if isinstance(argument, int):
        value = random.choice((argument + 1, argument - 1, *NUMBERS))
        return random.choice((b"\x8a\x09" + (value % 2**71).to_bytes(9, "little"), f"I{value}\n".encode()))
    if isinstance(argument, str) and op.name in ("BINUNICODE", "SHORT_BINUNICODE"):
        text = random.choice(TEXTS).encode("utf-8", "surrogatepass")
        return b"X" + struct.pack("<I", len(text)) + text
    return old[:1] + change_bytes(old[1:], random)


BY_KIND: dict[str, Change] = {
    "json": change_json,
    "header": change_header,
    "integers": change_integers,
    "pickle": change_pickle,
}
