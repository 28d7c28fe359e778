"""Parts that transformers saved are the same model here as in its own from_pretrained, which finds them by itself."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

import shardtree as st
from shardtree.interop.dtensor import load_module
from tests.formats.optimizer_formats import FIXTURES

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")

pytest.importorskip("transformers.distributed.checkpoint")
pytest.importorskip("torch.distributed.checkpoint.hf_storage")  # with which transformers reads
pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

FOLDERS = [FIXTURES / f"transformers_parts_{name}" for name in ("1", "fsdp2", "tp2")]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_from_pretrained_has_the_same_values(folder: Path, tmp_path: Path) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    ours = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(folder))
    keys = load_module(ours, folder)
    assert (keys.missing, keys.unused) == ((), ())
    expected = theirs.state_dict()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in ours.state_dict().items())
    # The shapes that a model of the same configuration has are what a conversion needs to be told.
    shapes = {key: tensor.shape for key, tensor in ours.state_dict().items()}
    options = st.LoadOptions(shapes=shapes)
    st.convert(folder, tmp_path / "whole", backend="huggingface", load_options=options)
    theirs.config.save_pretrained(tmp_path / "whole")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole", local_files_only=True)
    assert all(torch.equal(tensor, expected[key]) for key, tensor in again.state_dict().items())
