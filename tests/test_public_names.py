"""The root's names: some are there at once, the others when they are first asked for; nobody can tell which."""

from __future__ import annotations

import ast
import pickle
import subprocess
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

import shardtree
from shardtree._later import NAMES, ROOMS
from tests.faults.sampling import usually
from tests.quick_python.command import quick_python
from tests.test_architecture import MODULES, TEXTS

ROOT = Path(__file__).parents[1]


def fresh(code: str, *arguments: str) -> list[str]:
    """Return the words that code prints in a new process."""
    command = [*quick_python(), "-c", code, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def rooms(names: list[str]) -> set[str]:
    """Return our rooms that are among the names of loaded modules; a module beside them is none."""
    return {name.split(".")[1] for name in names if name.startswith("shardtree.") and name[len("shardtree.")] != "_"}


def checked_names(module: str) -> list[str]:
    """Return the names that a type checker finds in one of the root's modules: those imported as themselves."""
    body = ast.parse((ROOT / "shardtree" / module).read_text()).body
    body += [line for node in body if isinstance(node, ast.If) for line in node.body]
    found = [alias for node in body if isinstance(node, ast.ImportFrom) for alias in node.names]
    return [alias.name for alias in found if alias.name == alias.asname]


@pytest.mark.slow
@pytest.mark.parametrize("looks", ["", "; hasattr(shardtree, '__wrapped__'), hasattr(shardtree, '_x')"])
def test_importing_and_looking_for_what_is_private_load_no_room_and_no_torch(looks: str) -> None:
    code = f"import sys, shardtree{looks}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert rooms(loaded.split()) <= {"_moved", "_old_names"} and not {"torch", "numpy"} & {*loaded.split()}


def test_leaves_are_nodes_whatever_is_imported_first() -> None:
    code = """
import pickle, sys, optree
from shardtree.mapping import LocalNonpersistentObject
print(len(optree.tree_leaves([LocalNonpersistentObject(1)], namespace="shardtree")))
"""
    assert fresh(code) == ["1"]


LEAF = "st.ShardedTensor.from_rank_offsets('w', torch.ones(2))"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            f"import torch, optree, shardtree as st; leaves = optree.tree_leaves([{LEAF}], namespace='shardtree'); "
            "print(*[type(leaf).__name__ for leaf in leaves])",
            ["Tensor"],
        ),
        ("from shardtree import save, Mesh; print(save.__name__, Mesh.__name__)", ["save", "Mesh"]),
        ("import shardtree; print(shardtree.storage.__name__)", ["shardtree.storage"]),
        ("import gc, shardtree; shardtree.save; print(gc.isenabled())", ["True"]),
        ("import gc; gc.disable(); import shardtree; shardtree.save; print(gc.isenabled())", ["False"]),
    ],
    ids=["leaves are nodes", "a name that waited", "rooms are attributes", "the collector on", "the collector off"],
)
def test_after_an_import_all_is_as_after_any_other(code: str, words: list[str]) -> None:
    assert fresh(code) == words


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    usually(
        [
            "import shardtree; print(*shardtree.__all__)",
            "import shardtree; from shardtree._later import ROOMS; print(*sorted({*dir(shardtree)} - {*ROOMS}))",
            "import shardtree as s; from shardtree import *; print(*[each for each in s.__all__ if each in vars(s)])",
            "before = {*vars(), 'before'}\nfrom shardtree import *\nprint(*sorted({*vars()} - before))",
        ],
        1,
    ),
)
def test_every_way_to_the_names_gives_all_of_them(code: str) -> None:
    assert fresh(code) == shardtree.__all__


@pytest.mark.slow
def test_a_save_and_a_load_bring_no_other_format_no_conversion_and_no_remote_store(tmp_path: Path) -> None:
    code = """
import sys, torch, shardtree as st
tree = {"w": st.ShardedTensor.from_rank_offsets("w", torch.ones(2)), "step": 1}
st.save(tree, sys.argv[1])
st.load(tree, sys.argv[1])
print(*sys.modules)
"""
    loaded = fresh(code, str(tmp_path))
    assert {name.split(".")[1] for name in loaded if name.startswith("shardtree.")} == {
        *("core", "shell", "errors", "checkpoint", "_formats", "_later", "_leaves", "_moved", "_old_names"),
    }


MOST_MODULES = 130


@pytest.mark.slow
def test_a_save_of_one_tensor_loads_few_modules(tmp_path: Path) -> None:
    code = f"import sys, torch, shardtree as st; st.save([{LEAF}], sys.argv[1]); print(*sys.modules)"
    loaded = [name for name in fresh(code, str(tmp_path)) if name.partition(".")[0] == "shardtree"]
    assert len(loaded) <= MOST_MODULES, sorted(loaded)


def deferred_by(package: ModuleType) -> dict[str, str]:
    """Return the module of each name that a package or a face defers, as its text says at run time."""
    text = Path(str(package.__file__)).read_text()
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    (call,) = (node for node in calls if ast.unparse(node.func) in {"face", "later"})
    rest = [ast.literal_eval(each) for each in call.args[1:] if not isinstance(each, ast.Name)]
    table = rest[-1] if isinstance(rest[-1], dict) else {}
    deferred = {name: module for module, names in table.items() for name in names.split()}
    if ast.unparse(call.func) == "later":
        return deferred
    # From a face, which is no package, names are one level higher.
    found = {**dict.fromkeys(package.__all__, rest[0]), **deferred}
    return found if package.__file__.endswith("__init__.py") else {name: each[1:] for name, each in found.items()}


DEFERRING = [
    module
    for name in sorted(MODULES)
    if (module := import_module(".".join(["shardtree", *name.removesuffix("/__init__").split("/")])))
    and ("face(__name__" in TEXTS[name] or "later(\n" in TEXTS[name] or 'later(__name__, {"' in TEXTS[name])
    and name != "core/deferred"
]


@pytest.mark.parametrize("package", DEFERRING, ids=[package.__name__ for package in DEFERRING])
def test_a_type_checker_sees_the_names_that_a_package_defers(package: ModuleType) -> None:
    tree = ast.parse(Path(str(package.__file__)).read_text())
    (choice,) = (node for node in tree.body if isinstance(node, ast.If))
    found = [node for node in choice.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname or alias.name: f"{'.' * node.level}{node.module}" for node in found for alias in node.names}
    stubs = {"._typed": {"saving": "._save", "loading": "._load"}.get(package.__name__.rpartition(".")[2], "")}
    assert deferred_by(package) == {name: stubs.get(module, module) for name, module in seen.items()}
    assert all(hasattr(package, name) for name in seen)


def test_a_type_checker_sees_each_name_once_and_no_getattr() -> None:
    seen = checked_names("__init__.py") + checked_names("_later.py")
    assert [name for name, times in Counter(seen).items() if times > 1] == []
    assert sorted(seen) == sorted({*shardtree.__all__, *ROOMS})
    tree = ast.parse((ROOT / "shardtree" / "__init__.py").read_text())
    (choice,) = (node for node in tree.body if isinstance(node, ast.If))
    assert ast.unparse(choice.test) == "typing.TYPE_CHECKING"
    assert ast.unparse(choice.body[0]) == "from ._later import *"
    assert not any(isinstance(node, ast.FunctionDef) for node in tree.body), "a checker would take any name"


def test_each_name_is_that_of_its_room() -> None:
    for room, name in ((room, name) for room, names in NAMES.items() for name in names.split()):
        assert getattr(shardtree, name) is getattr(import_module(f"shardtree.{room}"), name)
    assert shardtree.save is shardtree.checkpoint.save
    assert [name for name in shardtree.__all__ if getattr(shardtree, name) is not vars(shardtree)[name]] == []


@pytest.mark.slow
def test_a_misspelt_name_is_told_with_a_guess() -> None:
    code = "import shardtree\nshardtree.loads"
    done = subprocess.run([*quick_python(), "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "AttributeError: module 'shardtree' has no attribute 'loads'. Did you mean: 'load'?" in done.stderr


@pytest.mark.slow
def test_a_pickled_leaf_is_found_in_a_new_process(tmp_path: Path) -> None:
    shard = shardtree.ShardedTensor.from_rank_offsets("w", torch.ones(2))
    (tmp_path / "leaf").write_bytes(pickle.dumps([shard.without_data(), shardtree.load, shardtree.Mesh]))
    code = "import pickle, sys; print(*[x.__class__.__name__ for x in pickle.load(open(sys.argv[1], 'rb'))])"
    assert fresh(code, str(tmp_path / "leaf")) == ["ShardedTensor", "function", "type"]


@pytest.mark.slow
def test_what_is_put_in_the_place_of_a_name_stays() -> None:
    code = """
import shardtree
shardtree.save = "early"
hasattr(shardtree, "no_such_name")
shardtree.load = "late"
dir(shardtree), hasattr(shardtree, "no_such_name")
print(shardtree.save, shardtree.load)
"""
    assert fresh(code) == ["early", "late"]


def test_no_name_at_all_is_no_name() -> None:
    assert not hasattr(shardtree, "")
