"""Torch's private names that shardtree uses: each is known here, with why, and is there in the torch that runs.

Where this fails, the name in the message is what broke, and on which torch; docs/installing.md has those that we run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch

PACKAGE = Path(__file__).parents[1] / "shardtree"

USED = {
    "torch._utils._flatten_dense_tensors": "small tensors are written as one: half the calls that views and cat are",
    "torch._neg_view": "an archive's tensor with the bit for lazy negation comes back with it",
    "torch._utils": "the module of the two that follow",
    "torch._utils._rebuild_tensor_v2": "what torch.save names in an archive as the function that makes a tensor",
    "torch._utils._rebuild_tensor_v3": "the same, for dtypes without a storage class",
    "torch._C": "the module of the seven that follow: modes of a thread, which no public function counts or leaves",
    "torch._C._swap_tensor_impl": "a model's parameter is traced in its place, also where it has views or weak "
    "references, which torch.utils.swap_tensors refuses",
    "torch._C._DisableAutocast": "no autocast inside of a call",
    "torch._C._is_any_autocast_enabled": "whether there is any, of whatever device",
    "torch._C._len_torch_dispatch_stack": "whether there are dispatch modes, such as FakeTensorMode",
    "torch._C._len_torch_function_stack": "how many function modes there are, a default device among them",
    "torch._C._DisableTorchDispatch": "what is traced is computed on its meta tensors",
    "torch._C._dispatch_has_kernel_for_dispatch_key": "whether an operation is made of others",
    "torch.Tensor._make_wrapper_subclass": "a tensor that is traced has a shape and no memory",
    "torch.overrides._get_current_function_mode_stack": "whether an operation is of a function of torch's",
    "torch.utils._python_dispatch._push_mode": "a thread that is traced has the mode; as a context, it would set flags "
    "of all threads",
    "torch.utils._python_dispatch._pop_mode": "and leaves it",
    "torch.utils._python_dispatch.TorchDispatchMode": "loading code is seen operation by operation while it is traced",
    "torch.overrides._pop_mode": "a function mode is left for a call",
    "torch.overrides._push_mode": "and entered again",
    "torch.utils._python_dispatch._disable_current_modes": "dispatch modes are left for a call",
    "torch.nn.modules.batchnorm._NormBase": "batch and instance norms, whose loading of old checkpoints is known",
    "torch.distributed.distributed_c10d._get_default_store": "a gloo group beside the job's needs its store, and no "
    "public function gives it; new_group has to be called by every rank",
}
"""By full name: what for."""

ON_OBJECTS = {
    "_get_root_mesh": ("torch.distributed.device_mesh", "DeviceMesh", "the mesh that a sub-mesh is cut from"),
    "_load_from_state_dict": ("torch.nn", "Module", "a module's own loading, which its hooks are part of"),
}
"""Methods that are called on torch's objects: where, on which class, and what for."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def chain(node: ast.expr) -> str | None:
    """Return ``a.b.c`` of an attribute's expression, None if it doesn't begin with a name."""
    if isinstance(node, ast.Attribute):
        before = chain(node.value)
        return None if before is None else f"{before}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else None


def private_names(text: str) -> Iterator[str]:
    """Yield torch's private names in a module's text, by full name."""
    modules = {"torch": "torch", "dist": "torch.distributed"}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch" and not node.level:
            for alias in node.names:
                if any(map(is_private, f"{node.module}.{alias.name}".split("."))):
                    yield f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith("torch.") and "._" in a.name)
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            first, _, rest = (chain(node) or "").partition(".")
            if first in modules:
                yield f"{modules[first]}.{rest}"


def found_in_package() -> set[str]:
    texts = (file.read_text() for file in PACKAGE.rglob("*.py"))
    return {name for text in texts if "torch" in text or "dist" in text for name in private_names(text)}


def test_no_private_name_is_used_that_is_not_known() -> None:
    # Before torch 2.6 or so the root mesh had to be asked of this one: it needn't be there.
    assert found_in_package() - {"torch.distributed.device_mesh._mesh_resources"} == USED.keys()


@pytest.mark.parametrize("name", USED)
def test_a_private_name_is_there(name: str) -> None:
    owner, _, attribute = name.rpartition(".")
    there = hasattr(resolve_name(owner), attribute)
    assert there, f"torch {torch.__version__} has no {name}, which shardtree uses: {USED[name]}"


@pytest.mark.parametrize("name", ON_OBJECTS)
def test_a_private_method_is_there_or_its_older_way(name: str) -> None:
    module, owner, why = ON_OBJECTS[name]
    there = hasattr(getattr(import_module(module), owner), name) or hasattr(import_module(module), "_mesh_resources")
    assert there, f"torch {torch.__version__} has no {module}.{owner}.{name}, which shardtree uses: {why}"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("from torch._utils import _a, b", ["torch._utils._a", "torch._utils.b"]),
        ("from torch.x import _a, b", ["torch.x._a"]),
        ("import torch._C", ["torch._C"]),
        ("dist._c10d.x(torch.nn.y)", ["torch.distributed._c10d"]),
        ("torch.__version__; self._torch; x.torch._y; from .torch import _z", []),
    ],
)
def test_private_names_are_found(text: str, names: list[str]) -> None:
    assert list(private_names(text.replace("; ", "\n"))) == names
