"""Tests that use more of torch, or of another package, than what the library runs on has: they are skipped there.

By what is there rather than by versions, so that nothing is skipped where it could run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from inspect import signature
from re import fullmatch

import torch

from tests.peers.megatron_versions import INSTALLED


def _takes(name: str, owner: Callable[..., object]) -> bool:
    return name in signature(owner).parameters


@cache
def _has(what: str) -> bool:
    """Return whether this environment has what a test needs."""
    import torch.distributed.checkpoint as dcp
    import torch.distributed.checkpoint.staging as staging
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import _dtensor_spec, _utils

    found = {
        "dcp.save(no_dist=…)": lambda: _takes("no_dist", dcp.save),
        "DefaultSavePlanner(enable_plan_caching=…)": lambda: _takes("enable_plan_caching", dcp.DefaultSavePlanner),
        "DeviceMesh(_rank=…)": lambda: _takes("_rank", DeviceMesh.__init__),
        "DefaultStager": lambda: hasattr(staging, "DefaultStager"),
        "ShardOrderEntry": lambda: hasattr(_dtensor_spec, "ShardOrderEntry"),
        "offsets of strided shards": lambda: hasattr(_utils, "_compute_local_shape_and_global_offset"),
        "float8_e8m0fnu": lambda: hasattr(torch, "float8_e8m0fnu"),
        "float4_e2m1fn_x2": lambda: hasattr(torch, "float4_e2m1fn_x2"),
        # It hands all of a stored tensor's properties to torch.empty, which doesn't know those of torch 2.15.
        "Megatron-Core for this torch": lambda: not hasattr(dcp.metadata.TensorProperties(), "strides"),
        "Megatron-Core with experts in two weights": lambda: INSTALLED <= (0, 16),
        "Muon": lambda: hasattr(torch.optim, "Muon"),
        "the package zarr": lambda: find_spec("zarr") is not None,
    }
    return bool(found[what]())


_MODULES = {
    "tests/benchmarks/test_every_benchmark.py": "DefaultStager",
    "tests/core/codec/test_values.py": "float4_e2m1fn_x2",
    "tests/interop/test_dtensor.py": "ShardOrderEntry",
    "tests/formats/test_dcp_read.py": "dcp.save(no_dist=…)",
    "tests/interop/test_dcp_plug.py": "dcp.save(no_dist=…)",
    "tests/interop/test_dcp_plug_ranks.py": "dcp.save(no_dist=…)",
    "tests/test_first_edition.py": "float8_e8m0fnu",
    "tests/test_golden.py": "float8_e8m0fnu",
}
"""Modules that can't be imported, or of which no test could run, where something is missing."""

_TESTS = {
    # What torch 2.6 writes differs in its padding, and it can't load integers of less than a byte by weights_only.
    r"tests/formats/test_archives\.py::test_(heads_and_tails|torch_and_we|a_head_is).*": "float8_e8m0fnu",
    r"tests/.*(four_bit_float|float4).*": "float4_e2m1fn_x2",
    r"tests/docs/test_bad_input\.py::.*float8_e8m0fnu.*": "float8_e8m0fnu",
    r"tests/docs/test_format\.py::test_every_dtype_with_a_tag_is_listed": "float4_e2m1fn_x2",
    r"tests/laws/test_abstract_law\.py::.*\[float8_e8m0fnu\]": "float8_e8m0fnu",
    r"shardtree/interop/dcp/.*": "dcp.save(no_dist=…)",
    r"tests/docs/test_in_your_trainer\.py::test_uneven_rows.*": "dcp.save(no_dist=…)",
    r"tests/peers/test_dcp_strided\.py::.*": "dcp.save(no_dist=…)",
    r"tests/peers/test_lenses_megatron\.py::test_grouped_experts_are_stored_as_theirs.*": (
        "Megatron-Core with experts in two weights"
    ),
    r"tests/peers/test_mesh_dtensor_peer\.py::.*": "offsets of strided shards",
    r"tests/peers/test_strict_megatron\.py::.*": "Megatron-Core for this torch",
    r"tests/core/plans/test_fit\.py::test_scales_and_packed.*": "float4_e2m1fn_x2",
    r"tests/quantised/.*(ue8m0|exponents_of_a_block_allow).*": "float8_e8m0fnu",
    r"tests/formats/test_dtensor_files\.py::test_(ranks|any_mesh|the_law_catches_even|fsdp2|terms|rows).*": (
        "DeviceMesh(_rank=…)"
    ),
    r"tests/formats/test_torch_dist_write\.py::test_the_index_is_what_torch_writes": "dcp.save(no_dist=…)",
    r"tests/formats/test_zarr_legacy\.py::.*": "the package zarr",
    r"tests/testing/test_check_resume.*muon.*": "Muon",
    r"tests/transforms/test_transforms\.py::.*\[float8_e8m0fnu\]": "float8_e8m0fnu",
}
"""By a pattern of tests' names, what they need."""


def modules_to_ignore() -> list[str]:
    """Return the test modules of which nothing can run here.

    Examples:
        >>> all(name.startswith("tests/") for name in modules_to_ignore())
        True
    """
    return [module for module, what in _MODULES.items() if not _has(what)]


def lacking(test: str) -> str | None:
    """Return what a test needs that isn't here, None if nothing.

    Examples:
        >>> lacking("tests/test_retention.py::test_anything") is None
        True
    """
    missing = (pattern for pattern, what in _TESTS.items() if not _has(what))  # most often none
    return next((_TESTS[pattern] for pattern in missing if fullmatch(pattern, test)), None)
