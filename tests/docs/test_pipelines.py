"""docs/surgery.md: its pipelines, as they stand there, give what numpy makes of the logical weights.

The page's text is run on checkpoints that eight ranks have written, simulated ones here, and Megatron-Core's own
processes further down.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import shardtree as st
from benchmarks._measuring import peak
from shardtree.testing import first_difference
from tests.docs import small_llama as small
from tests.docs.test_blocks import ROOT, fences

PAGE = (ROOT / "docs" / "surgery.md").read_text()
SCRIPTS = Path(__file__).parent / "scripts"
WEIGHTS = small.logical_weights()
PHI3, LLAMA = (small.hugging_face(WEIGHTS, fused=fused) for fused in (True, False))
Names = dict[str, Any]


def block(beginning: str) -> str:
    """Return the page's Python block that has a line that begins like that."""
    found = [code for _, language, code in fences(PAGE) if language == "python" and f"\n{beginning}" in f"\n{code}"]
    assert len(found) == 1, beginning
    return found[0]


PIPELINE, LLAMA_PIPELINE, BACK = block("to_hf = "), block("to_llama = "), block("to_megatron = ")


def run(code: str, folder: Path, names: Names | None = None) -> Names:
    """Run a page's text in a folder, and return the names that it makes."""
    names = {} if names is None else names
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec(code, names)
    return names


def save_ranks(folder: Path, *, stacked: bool) -> None:
    """Save the model from TP=4 x PP=2, and its optimizer, extra states and step beside it."""

    def save(world: st.World) -> None:
        tree = small.rank_tree(WEIGHTS, world.rank, stacked=stacked)
        st.save(tree, folder, ("torch_dist", 1), world=world, options=st.SaveOptions(durable=False))

    st.simulate(small.TENSOR * small.PIPELINE, save)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the checkpoint in both forms, and the one with keys for each layer by the page's name."""
    folder = tmp_path_factory.mktemp("saved")
    save_ranks(folder / "stacked", stacked=True)
    save_ranks(folder / "layers", stacked=False)
    (folder / "iter_0042000").symlink_to(folder / "layers")
    return folder


@pytest.fixture
def place(saved: Path, tmp_path: Path) -> Path:
    """Return an empty folder in which the checkpoints can be reached."""
    for name in ("stacked", "layers", "iter_0042000"):
        (tmp_path / name).symlink_to(saved / name)
    return tmp_path


def check_model(folder: Path, expected: Mapping[str, torch.Tensor]) -> None:
    """Raise unless a Hugging Face folder holds these tensors, bit for bit, and no others."""
    found = st.load_plain_tensors(folder)
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, tensor in expected.items():
        difference = first_difference(found[name], tensor)
        assert difference is None, f"{name} differs: {difference}"


def model_of(checkpoint: st.checkpoint.OpenCheckpoint) -> Names:
    return {key: checkpoint[key] for key in checkpoint if "weight" in key and "optimizer" not in key}


def save_llama(source: Path, folder: Path, code: str = LLAMA_PIPELINE) -> None:
    """Run the page's second pipeline, which needs names of the first one, on layers that are stacked."""
    names = run(PIPELINE.partition("checkpoint = ")[0] + code, folder)
    st.save(names["to_llama"](model_of(st.open_checkpoint(source))), folder / "llama", ("huggingface", 1))


def test_the_pipeline_gives_what_numpy_makes_of_the_weights(place: Path) -> None:
    run(PIPELINE, place)
    check_model(place / "hf", PHI3)


def test_layers_that_are_stacked_give_the_same(place: Path) -> None:
    save_llama(place / "stacked", place)
    check_model(place / "llama", LLAMA)


FAULTS: dict[str, tuple[str, str]] = {
    "QKV split without groups": (", groups=8", ""),
    "values before keys": ("merge_tensors, QKV,", "merge_tensors, [QKV[0], QKV[2], QKV[1]],"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_catches(fault: str, place: Path) -> None:
    right, wrong = FAULTS[fault]
    code = PIPELINE.replace(right, wrong)
    assert code != PIPELINE
    run(code, place)
    with pytest.raises(AssertionError, match="differs"):
        check_model(place / "hf", PHI3)


def test_the_comparison_catches_stacked_layers_split_without_groups(place: Path) -> None:
    save_llama(place / "stacked", place, LLAMA_PIPELINE.replace(", groups=8", ""))
    with pytest.raises(AssertionError, match=r"_proj\.weight differs"):
        check_model(place / "llama", LLAMA)


def test_nothing_is_read_before_the_save(place: Path) -> None:
    names = run(PIPELINE.partition("st.save(")[0], place)
    for name in (place / "iter_0042000").resolve().glob("*.distcp"):
        name.rename(name.with_suffix(".away"))
    try:
        tree = {shard.key: shard for shard in names["to_hf"](names["model"]).values()}
        assert {key: torch.Size(shard.global_shape) for key, shard in tree.items()} == {
            key: tensor.shape for key, tensor in PHI3.items()
        }
        with pytest.raises(st.CheckpointingException):
            tree["model.norm.weight"].data.read()
    finally:
        for name in (place / "iter_0042000").resolve().glob("*.away"):
            name.rename(name.with_suffix(".distcp"))
    # Each element that is kept is read once, and no others are.
    assert sum(shard.data.nbytes_to_read for shard in tree.values()) == sum(2 * t.nbytes for t in PHI3.values())


def loaded_at_tp2(folder: Path) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield each parameter that two ranks load through Megatron-Core's factories, and what it must be."""
    rounded = small.rounded(WEIGHTS)

    def load(world: st.World) -> Any:
        target = small.rank_tree(rounded, world.rank, stacked=False, tensor=2, pipeline=1)["model"]
        wanted = {leaf.key: leaf for leaf in target if not isinstance(leaf, st.ShardedObject)}
        halves = st.cast(wanted, torch.bfloat16)
        found = st.load(halves, folder, world=world)
        return [(key, found[key], leaf.data.bfloat16()) for key, leaf in wanted.items()]

    for rank in st.simulate(2, load):
        yield from rank


def check_at_tp2(folder: Path) -> None:
    """Raise unless ranks load the rounded weights, and zeros for the padding."""
    for key, found, expected in loaded_at_tp2(folder):
        is_padded = key in ("embedding.word_embeddings.weight", "output_layer.weight")
        right = torch.where(expected == 7, 0, expected) if is_padded else expected
        assert first_difference(found, right) is None, f"{key} differs"


def test_back_again_two_ranks_load_what_megatron_holds_at_tp_2(place: Path) -> None:
    names = run(PIPELINE + LLAMA_PIPELINE, place)
    run(BACK, place, names)
    check_at_tp2(place / "for-tp2")


def test_the_way_back_is_caught_too(place: Path) -> None:
    names = run(PIPELINE + LLAMA_PIPELINE, place)
    run(BACK.replace("GATE_UP)", "GATE_UP[::-1])"), place, names)
    with pytest.raises(AssertionError, match="differs"):
        check_at_tp2(place / "for-tp2")


def config(architecture: str) -> dict[str, Any]:
    """Return what `transformers` needs to know of the model."""
    return {
        "architectures": [f"{architecture}ForCausalLM"],
        "model_type": architecture.lower(),
        "hidden_size": small.HIDDEN,
        "intermediate_size": small.FFN,
        "num_hidden_layers": small.LAYERS,
        "num_attention_heads": small.HEADS,
        "num_key_value_heads": small.GROUPS,
        "vocab_size": small.VOCABULARY,
        "rms_norm_eps": small.EPSILON,
        "max_position_embeddings": 32,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def transformers_logits(folder: Path, architecture: str) -> torch.Tensor:
    """Return what `transformers` answers with a folder's weights, computed in float32."""
    transformers = pytest.importorskip("transformers")
    (folder / "config.json").write_text(json.dumps(config(architecture)))
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    assert type(model).__name__ == f"{architecture}ForCausalLM"
    with torch.no_grad():
        found: torch.Tensor = model.eval()(small.TOKENS).logits
    return found


MODELS: dict[str, Callable[[Path], Path]] = {
    "Phi3": lambda place: run(PIPELINE, place) and place / "hf",
    "Llama": lambda place: save_llama(place / "stacked", place) or place / "llama",
}


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")  # what importing transformers says isn't ours
@pytest.mark.parametrize("architecture", MODELS)
def test_transformers_answers_as_the_logical_weights_do(architecture: str, place: Path) -> None:
    found = transformers_logits(MODELS[architecture](place), architecture)
    right = small.logits(small.rounded(WEIGHTS), small.TOKENS)
    torch.testing.assert_close(found, right, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
def test_transformers_answers_otherwise_where_groups_are_ignored(place: Path) -> None:
    run(PIPELINE.replace(", groups=8", ""), place)
    found = transformers_logits(place / "hf", "Phi3")
    assert not torch.allclose(found, small.logits(small.rounded(WEIGHTS), small.TOKENS), atol=0.1)


def megatron(folder: Path, processes: int, *steps: str) -> None:
    """Let Megatron-Core do steps of the script, each ``what:form``, in several processes."""
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "megatron_llama.py"), str(folder), str(processes), *steps],
        capture_output=True,
        text=True,
        timeout=900,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.peers
@pytest.mark.torchrun
@pytest.mark.exhaustive
@pytest.mark.timeout(900)  # importing Megatron-Core three times, on a busy host
def test_megatrons_own_checkpoints_of_8_processes_go_there_and_back(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    megatron(tmp_path, 8, "save:stacked", "save:layers")
    (tmp_path / "iter_0042000").symlink_to(tmp_path / "layers")
    names = run(PIPELINE + LLAMA_PIPELINE, tmp_path)
    check_model(tmp_path / "hf", PHI3)
    save_llama(tmp_path / "stacked", tmp_path)
    check_model(tmp_path / "llama", LLAMA)
    megatron(tmp_path, 1, "logits:stacked", "logits:layers")
    right = small.logits(WEIGHTS, small.TOKENS)
    for form in ("stacked", "layers"):
        torch.testing.assert_close(torch.load(tmp_path / f"{form}.logits"), right, atol=1e-4, rtol=1e-4)
    run(BACK, tmp_path, names)
    unpadded = "\n".join(line for line in BACK.splitlines() if "pad_tensors" not in line)
    run(unpadded.replace("for-tp2", "unpadded"), tmp_path, names)
    assert st.load_tensors_metadata(tmp_path / "unpadded")["output_layer.weight"].global_shape[0] == small.VOCABULARY
    megatron(tmp_path, 2, "for-tp2:layers", "unpadded:layers")
    # The planted fault: groups forgotten on the way back.
    run(BACK.replace(", groups=8", "").replace("for-tp2", "wrong"), tmp_path, names)
    with pytest.raises(AssertionError, match=r"linear_qkv\.weight"):
        megatron(tmp_path, 2, "wrong:layers")


WIDE, FFN, WORDS = 1024, 3072, 4096
SHAPES = {
    "self_attention.linear_qkv.layer_norm_weight": (WIDE,),
    "self_attention.linear_qkv.weight": (2 * WIDE, WIDE),
    "self_attention.linear_proj.weight": (WIDE, WIDE),
    "mlp.linear_fc1.layer_norm_weight": (WIDE,),
    "mlp.linear_fc1.weight_w": (FFN, WIDE),
    "mlp.linear_fc1.weight_v": (FFN, WIDE),
    "mlp.linear_fc2.weight": (WIDE, FFN),
}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a checkpoint of 226 MB, whose largest matrix has 25 MB when gate and up are joined."""
    shapes = {f"decoder.layers.{layer}.{name}": shape for layer in range(4) for name, shape in SHAPES.items()}
    shapes |= dict.fromkeys(("embedding.word_embeddings.weight", "output_layer.weight"), (WORDS + 64, WIDE))
    shapes |= {"decoder.final_layernorm.weight": (WIDE,)}
    folder = tmp_path_factory.mktemp("large")
    tree = {key: st.ShardedTensor.from_rank_offsets(key, torch.randn(shape)) for key, shape in shapes.items()}
    st.save(tree, folder / "iter_0042000", ("torch_dist", 1))
    return folder


def large_pipeline(folder: Path, rank: int, ranks: int, *, reads_all: bool) -> Callable[[], int]:
    """Return what runs the page's pipeline for a model of this size; all that is loaded for it has been used."""
    sizes = f"sizes=[{WIDE}, {WIDE // 2}, {WIDE // 2}]"
    code = PIPELINE.replace("sizes=[64, 32, 32]", sizes).replace(", 50)", f", {WORDS})")
    names = run(code.partition("st.save(")[0], folder)
    st.save(
        [names["to_hf"](names["model"])["decoder.final_layernorm.weight"]],
        folder / f"little-{reads_all}",
        ("huggingface", 1),
    )

    def action() -> int:
        tree = names["to_hf"](names["model"])
        if reads_all:
            tree = st.map_shards(lambda leaf: replace(leaf, data=leaf.data.read()), tree)
        st.save(tree, folder / f"hf-{reads_all}", ("huggingface", 1))
        return 0

    return action


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, forks servers")


@linux
@pytest.mark.exhaustive
def test_a_pipeline_takes_little_memory(large: Path) -> None:
    assert peak(partial(large_pipeline, large, reads_all=False), large).own < 60_000_000


@linux
@pytest.mark.slow
def test_the_bound_on_memory_catches_tensors_that_are_all_read(large: Path) -> None:
    assert peak(partial(large_pipeline, large, reads_all=True), large).own > 117_000_000  # what is written
