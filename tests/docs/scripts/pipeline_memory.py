"""Make a checkpoint of 226 MB, or run the page's pipeline on it and print how many bytes of memory that took at most.

Called with a folder, then "make", or how the pipeline is run: "save", "convert", or "read", which reads every tensor
before it saves them.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import shardtree as st

LAYERS, WIDTH, FFN, WORDS, GROUPS = 4, 1024, 3072, 4096, 8
SHAPES = {
    "self_attention.linear_qkv.layer_norm_weight": (WIDTH,),
    "self_attention.linear_qkv.weight": (2 * WIDTH, WIDTH),
    "self_attention.linear_proj.weight": (WIDTH, WIDTH),
    "mlp.linear_fc1.layer_norm_weight": (WIDTH,),
    "mlp.linear_fc1.weight_w": (FFN, WIDTH),
    "mlp.linear_fc1.weight_v": (FFN, WIDTH),
    "mlp.linear_fc2.weight": (WIDTH, FFN),
}


def make(folder: Path) -> None:
    shapes = {f"decoder.layers.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in SHAPES.items()}
    shapes |= dict.fromkeys(("embedding.word_embeddings.weight", "output_layer.weight"), (WORDS + 64, WIDTH))
    shapes |= {"decoder.final_layernorm.weight": (WIDTH,)}
    state = {key: torch.randn(shape) for key, shape in shapes.items()}

    def save(world: st.World) -> None:
        def rows(_: str, leaf: Any) -> st.PartitionSpec:
            return st.PartitionSpec("tp") if leaf.ndim > 1 else st.PartitionSpec()

        tree = st.shard_at(state, st.Mesh(tp=4), rows, world.rank)
        st.save(tree, folder / "iter_0042000", ("torch_dist", 1), world=world, options=st.SaveOptions(durable=False))

    st.simulate(4, save)
    st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.ones(2))}, folder / "little", ("torch_dist", 1))


def pipeline() -> Any:
    """Return the page's pipeline for a model of this size."""
    from tests.docs.test_pipelines import PIPELINE

    code = PIPELINE.partition("checkpoint = ")[0]
    sizes = f"sizes=[{WIDTH}, {WIDTH // 2}, {WIDTH // 2}], groups={GROUPS}"
    names: dict[str, Any] = {}
    exec(code.replace("sizes=[64, 32, 32], groups=8", sizes).replace(", 50)", f", {WORDS})"), names)
    return names["to_hf"]


def opened(source: Path) -> dict[str, Any]:
    return dict(st.open_checkpoint(source))


def run(folder: Path, how: str, to_hf: Any) -> None:
    source, destination = folder / "iter_0042000", folder / f"hf-{how}"
    if how == "convert":
        bound = 16 * 1024 * 1024
        st.convert(source, destination, backend="huggingface", transform=to_hf, max_bytes_in_flight=bound)
        return
    tree = to_hf(opened(source))
    if how == "read":
        tree = st.map_shards(lambda leaf: replace(leaf, data=leaf.data.read()), tree)
    st.save(tree, destination, ("huggingface", 1))


def memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024


if __name__ == "__main__":
    torch.set_num_threads(1)
    where, what = Path(sys.argv[1]), sys.argv[2]
    if what == "make":
        make(where)
        sys.exit()
    function = pipeline()
    # What torch and others load when they are first used counts for nothing.
    st.save(dict(st.open_checkpoint(where / "little")), where / f"little-{what}", ("huggingface", 1))
    function(opened(where / "iter_0042000"))
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    run(where, what, function)
    os.write(1, f"{memory('VmHWM') - before}\n".encode())
