"""Our pickle machine: what it reads as pickle does, and what it refuses, without running anything."""

from __future__ import annotations

import pickle
import pickletools
import struct
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardtree.errors import CheckpointingException, CorruptCheckpoint, UnsafeFile, UnsupportedValue
from shardtree.formats.pickles import (
    Constructor,
    Global,
    New,
    Persistent,
    Reduced,
    Stub,
    inert,
    read_pickle,
    write_pickle,
)
from shardtree.formats.pickles._read import _HANDLERS, _unknown

FIXTURES = Path(__file__).parents[1] / "fixtures"

CLASSES = {
    ("builtins", "set"): Constructor(lambda items: set(items), keys=lambda items: items),
    ("builtins", "frozenset"): Constructor(lambda items: frozenset(items), keys=lambda items: items),
    ("builtins", "bytearray"): Constructor(lambda *args: bytearray(*args)),
    ("builtins", "bytes"): Constructor(bytes),
    ("_codecs", "encode"): Constructor(lambda text, name: text.encode("latin-1")),
    ("collections", "OrderedDict"): Constructor(OrderedDict),
    ("collections", "deque"): Constructor(deque),
}


def read(data: bytes, classes: Any = CLASSES, **options: Any) -> Any:
    return read_pickle(data, classes, what="a test", **options)


def hashables() -> st.SearchStrategy[Any]:
    numbers = st.integers() | st.integers(-(2**80), 2**80) | st.floats(allow_nan=False) | st.booleans() | st.none()
    leaves = numbers | st.text(max_size=4) | st.binary(max_size=4)
    return st.recursive(leaves, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=5)


def plain_values() -> st.SearchStrategy[Any]:
    """What `write_pickle` writes."""
    return st.recursive(
        hashables(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(hashables(), inner, max_size=3),
        max_leaves=12,
    )


def values() -> st.SearchStrategy[Any]:
    more = st.one_of(
        plain_values(),
        st.binary(max_size=300).map(bytearray),
        st.sets(hashables(), max_size=3),
        st.frozensets(hashables(), max_size=3),
        st.lists(plain_values(), max_size=3).map(deque),
        st.dictionaries(hashables(), plain_values(), max_size=3).map(OrderedDict),
    )
    return st.recursive(more, lambda inner: st.lists(inner, max_size=3).map(lambda items: [items, items]), max_leaves=4)


# ------------------------------------------------------------------------------------------------- reading


@given(values(), st.integers(0, 5))
def test_what_pickle_writes_is_read(value: Any, protocol: int) -> None:
    found = read(pickle.dumps(value, protocol))
    assert found == value
    assert repr(found) == repr(value) or "{" in repr(value)  # sets have no order


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"I01\n.", True),
        (b"I00\n.", False),
        (b"I-7\n.", -7),
        (b"L-70000000000L\n.", -70_000_000_000),
        (b"F1.5\n.", 1.5),
        (b"S'it\\'s \\x41'\n.", "it's A"),
        (b'S"\\xff"\n.', b"\xff"),
        (b"Vp\\u00efle\n.", "p\u00efle"),
        (b"T\x02\x00\x00\x00ab.", "ab"),
        (b"U\x02\xff\xfe.", b"\xff\xfe"),
        (b"B\x02\x00\x00\x00ab.", b"ab"),
        (b"(I1\nI2\nl.", [1, 2]),
        (b"(I1\nI2\nt.", (1, 2)),
        (b"(I1\nI2\nd.", {1: 2}),
        (b"I1\n2\x86.", (1, 1)),
        (b"(I1\nI2\n1I3\n.", 3),
        (b"I1\nI2\n0.", 1),
        (b"(0I3\n.", 3),
        (b"I5\np300\n0g300\n.", 5),
        (b"I5\nr\xff\xff\xff\xff0j\xff\xff\xff\xff.", 5),
        (b"\x80\x05\x96\x02\x00\x00\x00\x00\x00\x00\x00ab.", bytearray(b"ab")),
        (b"\x8d\x02\x00\x00\x00\x00\x00\x00\x00ab.", "ab"),
        (b"\x8e\x02\x00\x00\x00\x00\x00\x00\x00ab.", b"ab"),
        (b"\x8b\x02\x00\x00\x00\x00\x01.", 256),
        (b"\x8a\x00.", 0),
        (b"\x8f(K\x01K\x02\x90.", {1, 2}),
        (b"(K\x01\x91.", frozenset([1])),
        (b"N.garbage", None),
    ],
)
def test_opcodes_that_pickle_rarely_writes(data: bytes, value: Any) -> None:
    found = read(data)
    assert (found, type(found)) == (value, type(value))


def test_each_opcode_of_pickle_is_known() -> None:
    codes = {ord(opcode.code) for opcode in pickletools.opcodes}
    assert {code for code, handler in enumerate(_HANDLERS) if handler is not _unknown} == codes - {ord(".")}


def test_shared_values_are_shared() -> None:
    inner: list[Any] = []
    found = read(pickle.dumps([inner, inner]))
    assert found[0] is found[1]


def test_constructors_make_and_fill() -> None:
    classes = {("m", "A"): inert("m.A"), ("m", "value"): 7}
    new, reduced = New(Global("m", "A"), (1,), {"x": 2}), Reduced(Global("m", "A"), (3,))
    first, second, third = read(write_pickle([new, reduced, Global("m", "value")]), classes)
    assert (first.type_name, first.args, first.state) == ("m.A", (1,), {"x": 2})
    assert (second.args, second.state, third) == ((3,), None, 7)


def test_persistent_ids_are_looked_up() -> None:
    assert read(write_pickle([Persistent(("a", 1))]), persistent_load=lambda key: [key]) == [[("a", 1)]]
    assert read(b"Pabc\n.", persistent_load=lambda key: key * 2) == "abcabc"


@pytest.mark.parametrize("name", ["megatron_0161_tp2", "megatron_main202608_tp2", "megatron_0140_torch_dist_flat"])
def test_a_checkpoint_of_megatron_is_read_as_stubs(name: str) -> None:
    class Known(dict[Any, Any]):
        def __missing__(self, key: tuple[str, str]) -> Any:
            module, _, kind = ".".join(key).rpartition(".")
            return Stub(f"{module}.{kind}") if key[0] == "torch" and key[1].islower() else inert(".".join(key))

    found = read((FIXTURES / name / ".metadata").read_bytes(), Known())
    assert found.type_name == "torch.distributed.checkpoint.metadata.Metadata" or "MCore" in found.type_name
    assert len(found.state["state_dict_metadata"]) > 3
    assert all(isinstance(key, Stub) for key in found.state["storage_data"])


# ------------------------------------------------------------------------------------------------- writing


@given(plain_values(), st.sampled_from([2, 4]))
def test_what_is_written_is_read_by_pickle_and_by_us(value: Any, protocol: int) -> None:
    data = write_pickle(value, protocol=protocol)
    assert repr(pickle.loads(data)) == repr(value)
    assert repr(read(data)) == repr(value)
    assert max((opcode.proto for opcode, _, _ in pickletools.genops(data)), default=0) <= protocol


def check_written(write: Callable[[Any], bytes], value: Any) -> None:
    """The law of the writer, for the planted fault."""
    assert repr(pickle.loads(write(value))) == repr(value)


def test_the_law_of_the_writer_catches_numbers_cut_to_32_bits() -> None:
    def broken(value: Any) -> bytes:
        return write_pickle([item % 2**32 if type(item) is int else item for item in value])

    check_written(write_pickle, [1, -1, "a"])
    with pytest.raises(AssertionError):
        check_written(broken, [1, -1, "a"])


def test_what_cannot_be_written_is_refused() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    for value in (object(), {1}, cycle, [OrderedDict()], True + 0j):
        with pytest.raises(UnsupportedValue):
            write_pickle(value)
    with pytest.raises(UnsupportedValue):
        write_pickle(1, protocol=3)


def test_long_text_and_many_memos_are_written() -> None:
    value = ["é" * 300, b"x" * 70_000, *[f"key {number}" for number in range(70_000)], "key 5", (1,) * 5]
    assert pickle.loads(write_pickle(value)) == value
    assert pickle.loads(write_pickle(value, protocol=2)) == value


# ------------------------------------------------------------------------------------------------- code


def touching(path: Path) -> dict[str, bytes]:
    """Pickles of every opcode that can run code; each would make a file."""
    name = str(path).encode()
    opened = b"cbuiltins\nopen\n"
    args = b"(V" + name + b"\nVw\nt"
    text = struct.pack("<I", len(name)) + name
    stack_global = b"\x8c\x08builtins\x8c\x04open\x93"
    state = b"}V_fields\nN"
    return {
        "GLOBAL and REDUCE": opened + args + b"R.",
        "STACK_GLOBAL": b"\x80\x04" + stack_global + args + b"R.",
        "NEWOBJ": b"\x80\x02cio\nFileIO\n" + b"(X" + text + b"X\x01\x00\x00\x00wt\x81.",
        "NEWOBJ_EX": b"\x80\x04cio\nFileIO\n" + b"(X" + text + b"X\x01\x00\x00\x00wt}\x92.",
        "INST": b"(V" + name + b"\nVw\nibuiltins\nopen\n.",
        "OBJ": b"(" + opened + b"V" + name + b"\nVw\no.",
        "EXT1": b"\x82\x01" + args + b"R.",
        "EXT2": b"\x83\x01\x00" + args + b"R.",
        "EXT4": b"\x84\x01\x00\x00\x00" + args + b"R.",
        "BUILD": b"cbuiltins\nset\n(lp0\n" + state + b"sb.",
        "BUILD of a list": b"]" + b"}V__class__\nNsb.",
        "PERSID": b"P" + name + b"\n.",
        "BINPERSID": b"V" + name + b"\nQ.",
        "NEXT_BUFFER": b"\x80\x05\x97.",
        "READONLY_BUFFER": b"\x80\x05\x97\x98.",
        "a call of data": b"]" + args + b"R.",
        "a name in a tuple": b"(" + opened + b"I1\nt.",
        "the copyreg module": b"ccopyreg\n__newobj__\n(cio\nFileIO\n" + args[1:] + b"R.",
        "a name with dots": b"\x8c\x02io\x8c\x0fFileIO.__init__\x93.",
        "a name behind the end of the data": b"I1\n0" + opened + b".",
    }


@pytest.mark.parametrize("case", touching(Path("x")))
def test_nothing_is_run(case: str, tmp_path: Path) -> None:
    path = tmp_path / "ran"
    with pytest.raises(UnsafeFile) as caught:
        read(touching(path)[case])
    assert not path.exists()
    assert "a test" in str(caught.value)
    assert "allow_pickle=True" in str(caught.value)


@pytest.mark.parametrize("case", ["GLOBAL and REDUCE", "STACK_GLOBAL", "INST", "OBJ", "a name in a tuple"])
def test_the_crafted_pickles_would_run(case: str, tmp_path: Path) -> None:
    """The planted fault: pickle's own machine fails the test above."""
    path = tmp_path / "ran"
    try:
        value = pickle.loads(touching(path)[case])
    except Exception:
        value = None
    if isinstance(value, tuple):
        assert value[0] is open
        return
    value.close()
    assert path.exists()


def test_an_error_names_what_would_be_imported_before_anything_is_made() -> None:
    made: list[Any] = []
    classes = {("m", "A"): Constructor(made.append)}
    data = write_pickle([Reduced(Global("os.path", "join"), (Reduced(Global("m", "A"), (1,)),))])
    with pytest.raises(UnsafeFile, match=r"a test: it names os\.path\.join"):
        read(data, classes)
    assert made == []


def test_a_constructor_is_filled_at_most_once_and_only_if_it_can_be() -> None:
    twice = b"\x80\x02cm\nA\n)R}b}b."
    with pytest.raises(UnsafeFile):
        read(twice, {("m", "A"): inert("m.A")})
    with pytest.raises(UnsafeFile):
        read(b"\x80\x02cm\nA\n)R}b.", {("m", "A"): Constructor(list)})
    with pytest.raises(UnsafeFile):
        read(b"\x80\x04cm\nA\n)}V\x01\nNs\x92.", {("m", "A"): Constructor(dict)})


def test_a_class_is_no_value() -> None:
    for data in (b"cbuiltins\nset\n.", b"(cbuiltins\nset\nl.", b"}V1\ncbuiltins\nset\ns."):
        with pytest.raises(CorruptCheckpoint, match="a class, a function"):
            read(data)


# ------------------------------------------------------------------------------------------------- damage

SAMPLE = pickle.dumps({"a": [1, 2.5, (b"bytes", "text", 2**70)], (1, 2): {"x", "y"}, 3: OrderedDict(a=deque([1]))}, 4)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_a_pickle_that_ends_early_is_corrupt(protocol: int) -> None:
    data = pickle.dumps([{"a": [1, 2.5, ("text", 2**70)]}, OrderedDict(a=1)], protocol)
    for end in range(len(data)):
        with pytest.raises(CorruptCheckpoint):
            read(data[:end])


@given(st.lists(st.tuples(st.integers(0, len(SAMPLE) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_flipped_bytes_are_read_or_refused(changes: list[tuple[int, int]]) -> None:
    data = bytearray(SAMPLE)
    for place, byte in changes:
        data[place] = byte
    with suppress(CheckpointingException):
        read(bytes(data))


OPCODES = [opcode.code.encode("latin-1") for opcode in pickletools.opcodes]


@given(st.lists(st.sampled_from(OPCODES) | st.binary(min_size=1, max_size=2), max_size=30))
def test_any_opcodes_are_read_or_refused(codes: list[bytes]) -> None:
    with suppress(CheckpointingException):
        read(b"".join(codes) + b".")


MALFORMED = {
    "nothing": b"",
    "no stop": b"N",
    "an empty stack": b".",
    "unknown opcode": b"\xff.",
    "newer protocol": b"\x80\x06N.",
    "a mark that stays": b"(N.",
    "no mark": b"Nt.",
    "stack underflow at a mark": b"N(\x86.",
    "tuple of too few": b"N\x87.",
    "unknown memo": b"h\x05.",
    "memo of nothing": b"q\x00.",
    "memo without a number": b"Np\n.",
    "line without an end": b"S'abc",
    "long line": b"V" + b"a" * 100_000 + b"\n.",
    "string without quotes": b"Sabc\n.",
    "text that is not UTF-8": b"X\x01\x00\x00\x00\xff.",
    "text beyond the end": b"X\xff\xff\xff\xffab.",
    "negative length": b"T\xff\xff\xff\xffab.",
    "negative long": b"\x8b\xff\xff\xff\xffab.",
    "64-bit length": b"\x8d" + b"\xff" * 8 + b".",
    "frame beyond the end": b"\x80\x04\x95" + b"\xff" * 8 + b"N.",
    "digits without end": b"I" + b"9" * 5_000 + b"\n.",
    "number that is not": b"Iabc\n.",
    "float that is not": b"Fabc\n.",
    "key that cannot be": b"}]Ns.",
    "odd items": b"}(NNNu.",
    "items of a number": b"K\x01(NNu.",
    "append to a tuple": b")Na.",
    "members of a list": b"](N\x90.",
    "frozenset of lists": b"(]\x91.",
    "arguments that are not a tuple": b"cbuiltins\nset\n]R.",
    "arguments that do not fit": b"cbuiltins\nset\n)R.",
    "name of a number": b"K\x01K\x02\x93.",
    "name that is not UTF-8": b"c\xff\nset\n.",
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_pickles_are_corrupt(case: str) -> None:
    with pytest.raises(CorruptCheckpoint, match="a test"):
        read(MALFORMED[case])


# ------------------------------------------------------------------------------------------------- bombs


def doubled(times: int, start: bytes = b"N\x85", twice: bytes = b"2\x86") -> bytes:
    return start + twice * times


def int_keys(count: int) -> bytes:
    """A dict whose keys all have the hash 0; making it takes long, so it is made of opcodes."""
    keys = ((number * (2**61 - 1)).to_bytes(12, "little") for number in range(count))
    return b"}(" + b"".join(b"\x8a\x0c" + key + b"N" for key in keys) + b"u."


def filled_with(item: bytes, count: int) -> bytes:
    return item + b"q\x000](" + b"h\x00" * count + b"e"


BOMBS: dict[str, Callable[[], bytes]] = {
    "memory from a length": lambda: b"\x80\x02X\xff\xff\xff\x7fa.",
    "memory from a memo's number": lambda: b"Nr\xff\xff\xff\xff0" + b"Nr\xff\xff\xff\xfe" * 10 + b"\xff",
    "pairs of pairs": lambda: doubled(60) + b".",
    "lists of lists": lambda: b"]q\x00" + b"0](h\x00h\x00eq\x00" * 60 + b".",
    "dicts of dicts": lambda: b"}q\x00" + b"0}(K\x01h\x00K\x02h\x00uq\x00" * 60 + b".",
    "a key of pairs": lambda: b"}" + doubled(60) + b"Ns.",
    "a member of pairs": lambda: b"\x8f(" + doubled(60) + b"\x90.",
    "a frozenset of pairs": lambda: b"(" + doubled(60) + b"\x91.",
    "a set of pairs by its class": lambda: b"cbuiltins\nset\n(" + doubled(60) + b"l\x85R.",
    "frozensets of frozensets": lambda: b"}(N\x91" + b"q\x00(h\x00h\x00\x86\x91" * 3_000 + b"Ns.",
    "a deep key": lambda: b"}N" + b"\x85" * 1_000_000 + b"Ns.",
    "a deep tuple": lambda: b"N" + b"\x85" * 1_000_000 + b".",
    "deep lists": lambda: b"]" * 300_000 + b"a" * 299_999 + b".",
    "deep marks": lambda: b"(" * 1_000_000 + b".",
    "keys of one hash": lambda: int_keys(100_000),
    "one long key again and again": lambda: (
        b"\x8b" + struct.pack("<I", 2**20) + b"\x01" * 2**20 + b"q\x000](" + b"}h\x00Ns" * 200_000 + b"e."
    ),
    "one wide key again and again": lambda: b"(" + b"K\x01" * 10_000 + b"tq\x000](" + b"}h\x00Ns" * 100_000 + b"e.",
    "one wide list again and again": lambda: filled_with(b"(" + b"N" * 1_000_000 + b"l", 100_000) + b".",
    "one wide list copied again and again": lambda: (
        b"(" + b"N" * 100_000 + b"lq\x00](" + b"ccollections\ndeque\nh\x00\x85R" * 10_000 + b"e."
    ),
    "a list in itself": lambda: b"]q\x00h\x00a.",
    "a dict in itself": lambda: b"}q\x00K\x01h\x00s.",
    "a list in a tuple in itself": lambda: b"]q\x00h\x00\x85a.",
    "a deque in itself": lambda: b"ccollections\ndeque\n)Rq\x00h\x00a.",
}


@pytest.mark.slow
@pytest.mark.parametrize("case", BOMBS)
def test_bombs_are_refused_quickly(case: str) -> None:
    data = BOMBS[case]()
    begin = time.process_time()
    with pytest.raises(CorruptCheckpoint):
        read(data)
    assert time.process_time() - begin < 10


def test_a_stub_in_itself_is_refused() -> None:
    with pytest.raises(CorruptCheckpoint, match="contains itself"):
        read(b"cm\nA\n)Rq\x00}K\x01h\x00sb.", {("m", "A"): inert("m.A")})


def test_what_looks_like_a_bomb_and_is_none_is_read() -> None:
    shared = tuple(range(20))
    value = [{(number, "key"): shared for number in range(2_000)} for _ in range(3)]
    assert read(pickle.dumps(value)) == value
    deep: Any = []
    for _ in range(200):
        deep = [deep]
    assert read(pickle.dumps(deep)) == deep
    same_hash = {-1: 1, -2: 2, 2**61 - 1: 3, 0: 4, 0.5: 5}
    assert read(pickle.dumps([same_hash] * 10)) == [same_hash] * 10
