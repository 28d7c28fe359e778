"""The house rules that a machine can hold: who imports whom, who touches files, how long a module may be."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from tests.quick_python.command import quick_python

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "shardtree"
MODULES = {path.relative_to(PACKAGE).with_suffix("").as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
TEXTS = {name: path.read_text() for name, path in MODULES.items()}

PURE = {"core", "errors", "lenses", "meshes", "optim", "pictures", "quantised", "traces", "transforms"}
PURE |= {"live/resharding", "series/policies"}
# Modules of pure rooms that have an effect: they run a caller's code, which may load in several threads, so that one
# holds a lock; or draw to a notebook, a terminal or a file.
EFFECTS_IN_PURE = {"traces/_cells", "traces/_recording", "traces/_threads", "pictures/_display"}
EFFECT = {"shell", "formats", "maintenance", "stores", "live", "conversion", "series", "inspection", "interop", "cli"}
EFFECT |= {"kit"}  # with which formats and stores are written: a layer, though it holds no code
FACES = {
    *("buffers", "checkpoint", "display", "fingerprints", "layouts", "mapping", "objects", "plans", "retention"),
    *("kit", "storage", "strategies/__init__", "strategies/base", "trees", "world"),
}
IMPURE = {"os", "io", "pathlib", "random", "time", "torch.distributed", "shutil", "tempfile", "mmap", "threading"}
NAMES_ONLY = {"core/codec": {"io", "pathlib"}}  # buffers in memory, and paths as values

# Files are opened in storage/ alone; the command line may write what it prints.
MAY_TOUCH_FILES = {"shell/storage", "stores", "cli"}
FILE_MODULES = {"shutil", "tempfile", "mmap", "glob", "fcntl", "fsspec"}
FILE_METHODS = {"read_text", "write_text", "iterdir", "rglob", "hardlink_to", "symlink_to"}
NO_FILE = {
    "PathLike",
    "fspath",
    "fsencode",
    "fsdecode",
    "environ",
    "cpu_count",
    "getpid",
    "get_terminal_size",
    "sched_getaffinity",
    "urandom",
    "_exit",
}

MAY_IMPORT = {
    "torch.distributed": {"shell/world", "live", "interop"},
    "optree": {"core/trees"},
    "xxhash": {"shell/storage", "live"},
    "fsspec": {"stores"},
    "hypothesis": {"testing"},
    "rich": {"cli"},
    "typer": {"cli"},
    "zarr": {"formats"},
    "megatron": {"interop"},
}

LONGEST = 400
LONGER_BECAUSE: dict[str, str] = {  # "package/_module": why it's one piece
    "kit": "the names of the kit in their groups, and where each is: a list, without code",
    "cli/_app": "all commands on one page: what each is asked, and what it imports",
}

# Loading these takes longer than loading shardtree, and most programs don't need them.
HEAVY = {"rich", "typer", "fsspec", "hypothesis", "safetensors", "zarr", "megatron", "transformers", "pytest"}


def room(module: str) -> str:
    """Return the room of a module: a folder of the package, in the core and the shell one of theirs."""
    parts = module.split("/")
    return "/".join(parts[:2]) if parts[0] in {"core", "shell"} and len(parts) > 2 else parts[0]


def is_pure(module: str) -> bool:
    if module in EFFECTS_IN_PURE:
        return False
    in_pure = any(module == pure or module.startswith(f"{pure}/") for pure in PURE)
    return in_pure or (room(module) == "testing" and "law" in module)


@cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """Return a module and all that it is made of; what each rule looks through is made once."""
    return tuple(ast.walk(ast.parse(source)))


@cache
def imports(source: str, module: str = "x") -> list[str]:
    """Return the dotted name of whatever a module imports, ours as `.package.name`, wherever the import stands."""
    return list(_imports(source, module))


def _imports(source: str, module: str) -> Iterator[str]:
    for node in nodes(source):
        if isinstance(node, ast.Import):
            yield from (alias.name.removeprefix("shardtree") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = module.split("/")[: -node.level] if node.level else []
            base = "." * bool(node.level) + ".".join([*above, *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}".removeprefix("shardtree").replace("..", ".") for alias in node.names)
        elif (
            isinstance(node, ast.Attribute) and node.attr == "distributed" and ast.unparse(node) == "torch.distributed"
        ):
            yield "torch.distributed"


def reaches(name: str, target: str) -> bool:
    return name == target or name.startswith(target + ".")


def impurities(source: str, module: str = "core/trees/_x") -> list[str]:
    effects = {f".{name}" for name in EFFECT}
    pure = tuple(f".{name.replace('/', '.')}" for name in PURE if "/" in name)
    found = [name for name in imports(source, module) if any(reaches(name, bad) for bad in IMPURE | effects)]
    allowed = NAMES_ONLY.get(room(module), set())
    return [name for name in found if not name.startswith(pure) and name.split(".")[0] not in allowed]


def file_calls(source: str) -> list[str]:
    """Return every place where a module could touch a file, as `line: code`."""
    found = [name for name in imports(source) if any(reaches(name, bad) for bad in FILE_MODULES)]
    found += [name for name in imports(source) if name.startswith("os.") and name.split(".")[1] not in NO_FILE]
    for node in nodes(source):
        opens = isinstance(node, ast.Call) and ast.unparse(node.func) in {"open", "io.open", "np.memmap", "np.load"}
        via_os = isinstance(node, ast.Attribute) and ast.unparse(node.value) == "os" and node.attr not in NO_FILE
        via_path = isinstance(node, ast.Attribute) and node.attr in FILE_METHODS
        if opens or via_os or via_path:
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def test_layers_hold() -> None:
    import_module("importlinter")  # a peer that the README's environment lacks
    # In a process of its own: the linter configures logging, and writes to streams that this one's capture exchanges.
    code = "import importlinter.cli as cli; raise SystemExit(cli.lint_imports(cache_dir=None, no_logo=True))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def offenders(found: Mapping[str, object]) -> dict[str, object]:
    """Return the modules of which something was found."""
    return {module: what for module, what in found.items() if what}


def test_the_core_imports_no_effect() -> None:
    assert offenders({name: impurities(TEXTS[name], name) for name in MODULES if is_pure(name)}) == {}


@pytest.mark.slow
def test_files_are_touched_in_storage_alone() -> None:
    others = [name for name in MODULES if room(name) not in MAY_TOUCH_FILES]
    assert offenders({name: file_calls(TEXTS[name]) for name in others}) == {}


@pytest.mark.slow
@pytest.mark.parametrize("library", MAY_IMPORT)
def test_a_library_is_imported_by_its_package_alone(library: str) -> None:
    users = {module for module, text in TEXTS.items() if any(reaches(name, library) for name in imports(text, module))}
    assert {module for module in users if room(module) not in MAY_IMPORT[library]} == set()


def from_the_root(module: str) -> list[str]:
    """Return what a module imports of ours that is no room's: the root or a face, which would load all that waits."""
    ours = [name for name in imports(TEXTS[module], module) if name.startswith(".")]
    known = {name.split("/")[0] for name in PURE | EFFECT} | {"testing"}
    return [name for name in ours if name.removeprefix(".").split(".")[0] not in known]


def test_a_module_imports_from_our_rooms_not_from_the_root_or_a_face() -> None:
    """The root imports everything, so whoever imports from it depends on everything."""
    others = {"__init__", "_later", "_old_names", *FACES}
    assert offenders({name: from_the_root(name) for name in MODULES if name not in others}) == {}


def lines_of_code(source: str) -> list[str]:
    """Return the statements of a module that are neither imports, nor its list of names, nor a face's last line."""
    module = ast.parse(source)
    parts = [[*node.body, *node.orelse] if isinstance(node, ast.If) else [node] for node in module.body[1:]]
    body = [line for part in parts for line in part]
    targets = [(line, ast.unparse(line.targets[0])) for line in body if isinstance(line, ast.Assign)]
    lists = [line for line, target in targets if target in {"__all__", "(__getattr__, __dir__)"}]
    imported = [line for line in body if isinstance(line, ast.ImportFrom | ast.Import)]
    return [ast.unparse(line) for line in body if line not in [*imported, *lists]]


def test_a_face_holds_no_code() -> None:
    assert offenders({name: lines_of_code(TEXTS[name]) for name in FACES}) == {}
    assert lines_of_code("'A face.'\n__all__ = ['a']\nimport b\ndef a(): ...") == ["def a():\n    ..."]


def private_elsewhere(source: str, module: str) -> list[str]:
    """Return what a module imports from private modules of other rooms."""
    ours = [name.removeprefix(".").split(".") for name in imports(source, module) if name.startswith(".")]
    rooms = [(room("/".join([*name, "x"][:3])), name) for name in ours]
    return [
        ".".join(name)
        for other, name in rooms
        if other not in {room(module), "testing"} and any(part.startswith("_") for part in name[1:])
    ]


def test_nothing_private_of_another_room_is_imported() -> None:
    rooms = {name for name in MODULES if "/" in name and not name.endswith("/__init__")}
    assert offenders({name: private_elsewhere(TEXTS[name], name) for name in rooms}) == {}
    assert private_elsewhere("from ..mapping._tensor import ShardedTensor", "core/trees/_x") == [
        "core.mapping._tensor.ShardedTensor"
    ]


CHANGERS = {"append", "add", "update", "setdefault", "pop", "clear", "discard", "remove"}


def kept_by_a_process(source: str) -> set[str]:
    """Return the module-level names whose values change, or that are assigned anew, while the program runs."""
    module, *others = nodes(source)
    assert isinstance(module, ast.Module)
    changed = set[str]()
    pairs = [
        (node.targets[0] if isinstance(node, ast.Assign) else node.target, node.value)
        for node in module.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
    ]
    values = {target.id: value for target, value in pairs if isinstance(target, ast.Name) and value is not None}
    for node in others:
        if isinstance(node, ast.Global):
            changed.update(node.names)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr in CHANGERS:
            changed.add(node.value.id)
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and not isinstance(node.ctx, ast.Load):
            changed.add(node.value.id)
    calls = [(name, ast.unparse(value.func)) for name, value in values.items() if isinstance(value, ast.Call)]
    made = {name for name, func in calls if func in {"Lock", "count"} or func.startswith("Weak")}
    return set(changed & {*values}) | made


def test_what_a_process_keeps_is_on_the_page() -> None:
    rows = (ROOT / "docs" / "design.md").read_text().partition("## What a process keeps")[2].partition("\n## ")[0]
    places = [row.split(": ")[0].split("`")[1::2] for row in rows.splitlines() if row.startswith("- `")]
    listed = {(module, name) for module, *names in places for name in names}
    found = {(module, name) for module, text in TEXTS.items() for name in kept_by_a_process(text)}
    assert found - listed == set()
    assert {module for module, name in listed if name not in TEXTS[module]} == set()
    assert kept_by_a_process("a = {}\nb = {}\nc = Lock()\ndef f():\n    a[1] = b[1]") == {"a", "c"}


def test_a_module_says_what_it_holds() -> None:
    """Its docstring's first paragraph is a sentence."""
    heads = {name: text.partition("\nfrom __future__ import annotations\n")[0] for name, text in TEXTS.items()}
    said = {name: ast.get_docstring(ast.parse(head)) or "" for name, head in heads.items()}
    assert [name for name, text in said.items() if not text.split("\n\n")[0].rstrip().endswith((".", ":"))] == []


def test_a_module_is_short_or_says_why() -> None:
    lines = {name: len(text.splitlines()) for name, text in TEXTS.items()}
    assert {name for name, count in lines.items() if count > LONGEST} == set(LONGER_BECAUSE)


MAKERS = {
    *("empty", "zeros", "ones", "full", "arange", "tensor", "as_tensor", "asarray", "eye", "linspace", "scalar_tensor"),
    *("empty_strided", "rand", "randn", "randint", "randperm"),
}


def made_anywhere(source: str) -> list[str]:
    """Return where a tensor is made on whatever device is torch's default, as `line: code`."""
    calls = [node for node in nodes(source) if isinstance(node, ast.Call)]
    makers = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr in MAKERS]
    made = [call for call in makers if ast.unparse(call.func.value) == "torch"]
    bare = [call for call in made if not {"device", None} & {word.arg for word in call.keywords}]
    return [f"line {call.lineno}: {ast.unparse(call)}" for call in bare]


def test_tensors_are_made_on_a_device_that_is_said() -> None:
    assert {module: bare for module, text in TEXTS.items() if (bare := made_anywhere(text))} == {}
    assert made_anywhere("x = torch.zeros(2, dtype=d)\ny = torch.zeros(2, device=d)") == [
        "line 1: torch.zeros(2, dtype=d)"
    ]


@pytest.mark.slow
def test_importing_is_light_and_silent() -> None:
    code = "import sys, torch; before = set(sys.modules); import shardtree; print(*set(sys.modules) - before)"
    command = [*quick_python(), "-W", "error:::shardtree", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert {name.split(".")[0] for name in done.stdout.split()} & HEAVY == set()


@pytest.mark.parametrize(
    "source",
    [
        "import os",
        "def f():\n    import time",
        "import torch.distributed as dist",
        "import torch\ntorch.distributed.barrier()",
        "from ...shell.world import World",
        "from ... import formats",
        "from shardtree.shell.checkpoint import save",
    ],
)
def test_an_effect_in_the_core_is_found(source: str) -> None:
    assert impurities(source)


@pytest.mark.parametrize(
    "source",
    ["open('x')", "import os\nos.remove('x')", "from os import remove", "import tempfile", "path.write_text('x')"],
)
def test_a_file_call_is_found(source: str) -> None:
    assert file_calls(source)


def test_what_is_allowed_is_not_reported() -> None:
    assert impurities("import numpy, torch\nfrom ..geometry import boxes\nfrom ._paths import path") == []
    assert file_calls("import os\nfrom os import PathLike\nworkers = os.cpu_count()") == []
