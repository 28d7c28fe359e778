"""torch_checkpointing's folders open without the package, as it saves them from several processes."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

import shardtree as st
from shardtree.core.trees import path_key
from shardtree.errors import CorruptCheckpoint, UnsafeFile, UnsupportedValue
from shardtree.formats.torch_checkpointing import recognize
from shardtree.strategies import Damage
from shardtree.testing import first_difference
from shardtree.trees import HOLE, leaves_with_paths
from tests.faults.test_wrong_values import foreign
from tests.faults.wrong_values import OTHER_TYPES, value_ends, with_value
from tests.quick_python.command import torchrun
from tests.shell.table.folders import archive, folder_of

pytest.importorskip("torch_checkpointing")
SCRIPT = Path(__file__).parents[1] / "peers" / "scripts" / "torch_checkpointing_saves.py"
FORMS = ["plain", "described"]


@pytest.fixture(scope="module", params=[1, 4])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """Return how many processes saved, and where: FSDP2, AdamW, a cut along two axes, plain values, a rank's own."""
    folder = tmp_path_factory.mktemp("saved")
    done = torchrun(request.param, SCRIPT, str(folder))
    assert done.returncode == 0, done.stderr
    return request.param, folder


def truth(folder: Path) -> dict[str, torch.Tensor]:
    whole = torch.load(folder / "truth.pt", weights_only=False)
    pairs = leaves_with_paths(whole)
    return {path_key(path): leaf for path, leaf in pairs if isinstance(leaf, torch.Tensor)}


def differences(place: Any, folder: Path) -> list[str]:
    found, expected = st.load_plain_tensors(place), truth(folder)
    return [key for key in {**found, **expected} if first_difference(found[key], expected[key]) is not None]


@pytest.mark.slow
@pytest.mark.torchrun
@pytest.mark.parametrize("form", FORMS)
def test_what_processes_saved_opens_in_any_layout(saved: tuple[int, Path], form: str, tmp_path: Path) -> None:
    ranks, folder = saved
    place = folder / form
    assert differences(place, folder) == []
    assert st.verify(place) == ()
    common = st.load_common_state_dict(place)
    assert common["step"] == 7 and common["tensors"] == {"copies": [HOLE, {"lr": 0.5}]}
    assert common["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.999)
    if ranks == 1:
        assert common["loader"] == {"rank": 0}
    else:
        loader = st.open_checkpoint(place)[f"loader/shard_{ranks - 1}_{ranks}"]
        assert loader.data == {"rank": ranks - 1}
    stored = st.load_tensors_metadata(place)

    def columns(world: Any) -> Any:
        spec = {key: st.PartitionSpec(*[None] * (len(one.global_shape) - 1), "tp") for key, one in stored.items()}
        cut = st.abstract_at(
            stored, st.Mesh(tp=3), lambda key, leaf: spec[key] if stored[key].global_shape else st.P(), world.rank
        )
        return st.load(cut, place, world=world)["tensors.both"]

    assert torch.equal(torch.cat(st.simulate(3, columns), dim=1), truth(folder)["tensors.both"])
    for backend, left_out in (("safetensors", []), ("dcp", []), ("huggingface", ["common", "loader**"])):
        st.convert(place, tmp_path / backend, backend=backend, leave_out=left_out if ranks > 1 else left_out[:1])
        assert differences(tmp_path / backend, folder) == []


@pytest.mark.slow
@pytest.mark.torchrun
def test_a_save_that_is_killed_before_its_barrier_leaves_what_is_refused(tmp_path: Path) -> None:
    done = torchrun(2, SCRIPT, str(tmp_path), "killed")
    assert done.returncode != 0 and "SIGKILL" in done.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["tmp_plain"]
    assert {"model_0.pt", "model_1.pt"} <= {each.name for each in (tmp_path / "tmp_plain").iterdir()}
    assert not st.is_checkpoint(tmp_path / "plain")
    with pytest.raises(CorruptCheckpoint, match="was not finished"):
        st.open_checkpoint(tmp_path / "tmp_plain")


# Folders made by hand


def described(groups: dict[str, Any], ranks: int, layouts: Callable[[int], Any] = lambda rank: None) -> dict[str, Any]:
    item = {"nested_path_to_metadata": groups, "rank_to_layout_info": {rank: layouts(rank) for rank in range(ranks)}}
    return {"metadata": {"model": item}, "world_size": ranks, "version": "2.0"}


def boxes(*rows: tuple[Any, Any, Any], shape: tuple[int, ...] = (4, 2)) -> dict[str, Any]:
    offsets, inner, sizes = (list(each) for each in zip(*rows, strict=True))
    data = {"global_shape": shape, "global_offsets": offsets, "local_offsets": inner, "local_sizes": sizes}
    return {"type": "default_tensor_v1", "data": data | {"dtype": "torch.float32"}}


def of_boxes(*per_rank: dict[str, Any]) -> dict[str, Any]:
    groups = [{"sharding_metadata": each, "ranks": [rank]} for rank, each in enumerate(per_rank)]
    return {json.dumps(["w"], separators=(",", ":")): groups}


WHOLE = torch.arange(8.0).reshape(4, 2)
FIRST = boxes(([0, 0], [0, 0], [1, 2]), ([3, 0], [1, 0], [1, 2]))
MIDDLE = boxes(([1, 0], [0, 0], [2, 2]))


def by_hand(metadata: dict[str, Any]) -> dict[str, bytes]:
    parts = {"model_0.pt": {"w": WHOLE[[0, 3]]}, "model_1.pt": {"w": WHOLE[1:3]}}
    return {name: archive(value) for name, value in parts.items()} | {"metadata.pkl": pickle.dumps(metadata)}


def test_boxes_of_tensors_that_are_no_dtensors_lie_where_the_metadata_says() -> None:
    found = st.load_plain_tensors(folder_of(by_hand(described(of_boxes(FIRST, MIDDLE), 2))))
    assert torch.equal(found["model.w"], WHOLE)


OWN, ITSELF = r"'model\.w': '.*model_1\.pt' has", r"'model\.w': .*contradicts itself"
TWICE = {"type": "default_tensor_v1", "data": MIDDLE["data"] | {"local_sizes": [[2, 2], [1, 2]]}}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "columns": (boxes(([1, 0], [0, 0], [2, 1])), r"'model\.w': 6 of 8 elements"),
    "beyond the rank's tensor": (boxes(([1, 0], [1, 0], [2, 2])), OWN),
    "beyond the whole": (boxes(([3, 0], [0, 0], [2, 2])), OWN),
    "another kind": ({"type": "DTensorShardingMetadata", "data": {}}, OWN),
    "another whole": (boxes(([1, 0], [0, 0], [2, 2]), shape=(9, 2)), ITSELF),
    "more sizes than offsets": (TWICE, ITSELF),
    "a gap": (boxes(([1, 0], [0, 0], [1, 2])), r"'model\.w': 6 of 8 elements"),
    "rows of another rank": (boxes(([2, 0], [0, 0], [2, 2])), r"'model\.w': some elements twice"),
}


@pytest.mark.parametrize("name", WRONG)
def test_boxes_that_are_not_the_ranks_rows_are_refused_by_name(name: str) -> None:
    wrong, said = WRONG[name]
    with pytest.raises(st.errors.CheckpointingException, match=said):
        st.load_plain_tensors(folder_of(by_hand(described(of_boxes(FIRST, wrong), 2))))


def refused(files: dict[str, bytes], words: str) -> None:
    """Check that a folder is corrupt, by every call that looks at what is in it."""
    place = folder_of(files)
    for call in (st.open_checkpoint, st.load_plain_tensors):
        with pytest.raises(CorruptCheckpoint, match=words):
            call(place)
    (damage,) = (one for one in st.verify(place) if isinstance(one, Damage))
    assert re.search(words, damage.what)


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([{"sharding_metadata": FIRST, "ranks": [0]}, {"sharding_metadata": MIDDLE, "ranks": [1]}], "of ranks 0, 1"),
        ([{"sharding_metadata": {"type": "DTensorShardingMetadata", "data": {}}, "ranks": (0, 1)}], "of ranks 0, 1"),
        ([], "in no file"),
    ],
)
def test_a_tensor_that_is_described_and_that_no_file_holds_is_damage(groups: Any, words: str) -> None:
    refused(
        by_hand(described(of_boxes(FIRST, MIDDLE) | {'["gone"]': groups}, 2)), rf'\["gone"\] in \'model\': .*{words}'
    )


def test_a_tensor_that_a_rank_lacks_is_damage() -> None:
    files = by_hand(described(of_boxes(FIRST, MIDDLE), 2)) | {"model_1.pt": archive({"v": WHOLE})}
    refused(files, r'\["w"\] in \'model\': not in the files of rank 1')


def placed(*placements: str, ranks: tuple[int, ...] = (0, 1)) -> list[dict[str, Any]]:
    """Return what is said of a DTensor, or of a plain tensor, which the package describes as a replicated one."""
    data = {"global_shape": [4, 2], "placements": [{"type": name} for name in placements]}
    return [{"sharding_metadata": {"type": "DTensorShardingMetadata", "data": data}, "ranks": ranks}]


PLAIN = placed("Replicate")
STAGES = {"model_0.pt": {"a": WHOLE}, "model_1.pt": {"b": WHOLE + 1}}
"""What two stages of a pipeline save: plain tensors, of which the first rank describes its own as both ranks'."""


def stages(groups: dict[str, Any], parts: dict[str, Any] = STAGES) -> dict[str, bytes]:
    files = {name: archive(value) for name, value in parts.items()}
    return files | {"metadata.pkl": pickle.dumps(described(groups, 2))}


@pytest.mark.parametrize("groups", [{'["a"]': PLAIN}, {'["a"]': PLAIN, '["b"]': placed("Replicate", ranks=(1,))}])
def test_a_plain_tensor_is_asked_of_the_rank_that_describes_it(groups: dict[str, Any]) -> None:
    place = folder_of(stages(groups))
    found = st.load_plain_tensors(place)
    assert set(found) == {"model.a", "model.b"} and torch.equal(found["model.b"], WHOLE + 1)
    assert st.verify(place) == ()


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ({'["gone"]': PLAIN}, r'\["gone"\] in .model.: not in the files of rank 0'),
        ({'["b"]': PLAIN}, r'\["b"\] in .model.: not in the files of rank 0'),
        ({'["a"]': placed("Replicate", "Shard")}, r'\["a"\] in .model.: not in the files of rank 1'),
        ({'["a"]': placed()}, r'\["a"\] in .model.: not in the files of rank 1'),
    ],
)
def test_a_tensor_that_its_ranks_lack_is_damage_with_stages_too(groups: dict[str, Any], words: str) -> None:
    refused(stages(groups), words)


def of_items(items: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of items, each of which lists both ranks without a layout."""
    layouts = {0: None, "1": None}
    listed = {item: {"nested_path_to_metadata": said, "rank_to_layout_info": layouts} for item, said in items.items()}
    return {"metadata": listed, "world_size": 2, "version": "2.0"}


ITEMS = {"model_0.pt": {"a": WHOLE}, "model_1.pt": {"a": WHOLE}}


@pytest.mark.parametrize("extra", [{"extra_0.pt": {"b": WHOLE}}, {"extra_1.pt": {"b": WHOLE}}])
def test_an_item_that_some_ranks_have_opens(extra: dict[str, Any]) -> None:
    rank = int(next(iter(extra))[-4])
    saved = of_items({"model": {'["a"]': PLAIN}, "extra": {'["b"]': placed("Replicate", ranks=(rank,))}})
    files = {name: archive(value) for name, value in (ITEMS | extra).items()}
    place = folder_of(files | {"metadata.pkl": pickle.dumps(saved)})
    assert set(st.load_plain_tensors(place)) == {"model.a", "extra.b"} and st.verify(place) == ()


def test_items_of_one_stage_each_open() -> None:
    saved = of_items({f"stage{rank}": {'["w"]': placed("Shard", ranks=(rank,))} for rank in range(2)})
    files = {f"stage{rank}_{rank}.pt": archive({"w": WHOLE + rank}) for rank in range(2)}
    found = st.load_plain_tensors(folder_of(files | {"metadata.pkl": pickle.dumps(saved)}))
    assert {key: value[0, 0].item() for key, value in found.items()} == {"stage0.w": 0, "stage1.w": 1}


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({}, r"extra_0\.pt.* is missing"),
        ({'["b"]': placed("Shard")}, r"extra_0\.pt.* is missing"),
    ],
)
def test_an_item_that_no_rank_has_is_damage(said: dict[str, Any], words: str) -> None:
    files = {name: archive(value) for name, value in ITEMS.items()}
    refused(files | {"metadata.pkl": pickle.dumps(of_items({"model": {'["a"]': PLAIN}, "extra": said}))}, words)


@pytest.mark.parametrize(("placement", "lost"), [("Shard", 0), ("Shard", 1), ("Replicate", 0)])
def test_a_ranks_file_that_is_lost_with_what_it_described_is_damage(placement: str, lost: int) -> None:
    saved = of_items({"model": {'["a"]': placed(placement)}})
    files = {name: archive(value) for name, value in ITEMS.items() if name != f"model_{lost}.pt"}
    refused(files | {"metadata.pkl": pickle.dumps(saved)}, rf'\["a"\] in .model.: not in the files of rank {lost}')


def named(*names: str) -> Callable[[int], Any]:
    """Return a rank's layout, by the file that metadata.pkl names for it."""
    return lambda rank: {"file_path": names[rank], "serialization_format": {"type": "TorchSerialization"}}


@pytest.mark.parametrize("name", ["model_0.pt", "./model_0.pt", ".//model_0.pt"])
def test_a_file_that_is_named_for_two_ranks_is_damage(name: str) -> None:
    refused(by_hand(described({}, 2, named("model_0.pt", name))), r"names files twice\n  'model_0\.pt'")


def test_a_file_that_is_named_for_two_items_is_damage() -> None:
    saved = described({}, 2)
    saved["metadata"]["optimizer"] = described({}, 1, named("model_1.pt"))["metadata"]["model"]
    refused(by_hand(saved), r"names files twice\n  'model_1\.pt'")


def test_ranks_files_that_are_missing_are_counted_and_a_few_are_named() -> None:
    one = {"nested_path_to_metadata": {}, "rank_to_layout_info": {0: None, 1: None}}
    saved = {"metadata": {f"item{number}": one for number in range(300)}, "world_size": 2**62, "version": "2.0"}
    refused(
        {"metadata.pkl": pickle.dumps(saved)}, rf"item0_2\.pt(\n  item0_\d+\.pt)+\n  and {300 * (2**62 - 2) - 10} more"
    )


def test_copies_of_boxes_that_differ_are_refused_by_name() -> None:
    files = by_hand(described(of_boxes(boxes(([0, 0], [0, 0], [4, 2])), boxes(([0, 0], [0, 0], [4, 2]))), 2))
    equal = files | {f"model_{rank}.pt": archive({"w": WHOLE}) for rank in range(2)}
    assert torch.equal(st.load_plain_tensors(folder_of(equal))["model.w"], WHOLE)
    with pytest.raises(st.errors.CheckpointingException, match="have different copies of it"):
        st.load_plain_tensors(folder_of(equal | {"model_1.pt": archive({"w": WHOLE + 1})}))


@pytest.mark.parametrize(
    "hide", [lambda tensor: {tensor}, lambda tensor: {tensor: 1}, lambda tensor: [frozenset([tensor])]]
)
def test_tensors_that_no_path_leads_to_are_refused(hide: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(UnsupportedValue, match="outside of dicts, lists and tuples"):
        st.open_checkpoint(folder_of({"model_0.pt": archive({"held": hide(WHOLE)})}))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda saved: saved | {"version": "1.0"}, UnsupportedValue, "version 1.0"),
        (lambda saved: saved | {"world_size": "two"}, CorruptCheckpoint, r"saved\['world_size'\]"),
        (
            lambda saved: described(
                {}, 2, lambda rank: {"file_path": "m.json", "serialization_format": {"type": "JsonSerialization"}}
            ),
            UnsupportedValue,
            "JsonSerialization",
        ),
        (lambda saved: saved | {"world_size": 3}, CorruptCheckpoint, r"model_2\.pt"),
        (lambda saved: Shard(0), UnsafeFile, "Shard"),
    ],
)
def test_metadata_that_is_not_as_the_package_writes_it_is_refused(
    change: Callable[[Any], Any], error: type[Exception], words: str
) -> None:
    saved = described(of_boxes(FIRST, MIDDLE), 2)
    with pytest.raises(error, match=words):
        st.open_checkpoint(folder_of(by_hand(change(saved))))


def test_a_layouts_own_files_are_read() -> None:
    layout = {"serialization_format": {"type": "TorchSerialization"}}
    saved = described({}, 1, lambda rank: layout | {"file_path": f"rank_{rank}/model.pt"})
    place = folder_of({"rank_0/model.pt": archive({"w": WHOLE}), "metadata.pkl": pickle.dumps(saved)})
    assert torch.equal(st.load_plain_tensors(place)["model.w"], WHOLE)
    place.remove("rank_0/model.pt")
    with pytest.raises(CorruptCheckpoint, match=r"rank_0/model\.pt.* is missing"):
        st.open_checkpoint(place)


@pytest.mark.parametrize("path", ["../model.pt", "/etc/passwd", "a\\..\\b"])
def test_names_that_climb_out_are_refused(path: str, tmp_path: Path) -> None:
    saved = described({}, 1, lambda rank: {"file_path": path, "serialization_format": {"type": "TorchSerialization"}})
    (tmp_path / "metadata.pkl").write_bytes(pickle.dumps(saved))
    with pytest.raises(st.errors.CheckpointingException):
        st.open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "names", [["step_100.pt", "step_200.pt"], ["model_1.pt"], ["model.pt"], ["model_00.pt"], ["notes.txt"], []]
)
def test_other_folders_are_not_recognised(names: list[str]) -> None:
    assert recognize(folder_of(dict.fromkeys(names, b""))) is None


@pytest.mark.slow
def test_a_value_of_another_type_is_an_error_of_ours() -> None:
    files = by_hand(described(of_boxes(FIRST, MIDDLE), 2))
    data, wrong = files["metadata.pkl"], []
    places = [(end, value) for end, _ in value_ends(data) for value in OTHER_TYPES]
    for end, value in Random(20261127).sample(places, min(len(places), 400)):
        wrong += foreign(files | {"metadata.pkl": with_value(data, end, OTHER_TYPES[value])})
    assert wrong == []
