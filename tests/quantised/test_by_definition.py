"""Forms that transformers has no code for the CPU for, beside their definitions, an element at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import shardtree as st
from shardtree.errors import ShapeError, UnsupportedValue
from shardtree.quantised import FORMS, recode
from shardtree.testing import check_quantised, first_difference
from tests.quantised.stored import held, stored

GPTQ = {"gptq": 1, "gptq_v2": 0, "gptq_in_order": 1, "gptq_v2_in_order": 0}
"""By form what is added to zeros."""


@pytest.mark.parametrize("name", GPTQ)
def test_gptq(name: str) -> None:
    tensors = stored(name, key="weight")
    values, scales, zeros, groups = (each.tolist() for each in tensors.values())
    expected = torch.empty(24, 384)
    for column in range(24):
        for row in range(384):
            group = groups[row]
            integer = values[row // 8][column] >> 4 * (row % 8) & 15
            zero = (zeros[group][column // 8] >> 4 * (column % 8)) + GPTQ[name] & 15
            expected[column, row] = (integer - zero) * scales[group][column]
    found = FORMS[name].dequantise(tensors, torch.float32)["weight"]
    assert first_difference(found.contiguous(), expected) is None


def test_a_global_scale_divides_and_a_second_one_multiplies() -> None:
    tensors = stored("nvfp4_packed", key="weight")
    by = torch.tensor([8.0])
    packed = FORMS["nvfp4_packed"].dequantise(tensors | {"weight_global_scale": by})["weight"]
    values, scales, _ = tensors.values()
    other = {"weight": values, "weight_scale": scales, "weight_scale_2": 1 / by[0]}
    assert torch.equal(packed, FORMS["nvfp4"].dequantise(other)["weight"])
    with pytest.raises(ShapeError, match=r"'weight_global_scale': float32 \(\), not float32 \(1,\)"):
        FORMS["nvfp4_packed"].dequantise(tensors | {"weight_global_scale": by[0]})


INT4 = {"int4_packed": 128, "int4_packed_rows": 256, "int4_packed_zeros": 128, "int4_packed_rows_zeros": 256}
"""By form how many columns have one scale, of 256."""


@pytest.mark.parametrize("name", INT4)
def test_int4(name: str) -> None:
    tensors = stored(name, key="weight") | {"weight_shape": torch.tensor([20, 256], dtype=torch.int32)}
    if "rows" in name:
        tensors["weight_packed"] = tensors["weight_packed"].repeat(1, 2)[:, :32]
    values, scales, _, *rest = (each.tolist() for each in tensors.values())
    expected = torch.empty(20, 256)
    for row in range(20):
        for column in range(256):
            group = column // INT4[name]
            integer = values[row][column // 8] >> 4 * (column % 8) & 15
            zero = rest[0][row // 8][group] >> 4 * (row % 8) & 15 if rest else 8
            expected[row, column] = (integer - zero) * scales[row][group]
    assert first_difference(FORMS[name].dequantise(tensors, torch.float32)["weight"], expected) is None


@pytest.mark.parametrize("name", INT4)
def test_integers_of_other_bits_and_padded_rows_are_refused(name: str) -> None:
    """Eight bits in integers have the shapes of four, of twice the columns: only the stored shape tells."""
    form, tensors = FORMS[name], stored(name, key="weight")
    rows, columns = tensors["weight_shape"].tolist()
    for size in (columns // 2, columns - 3):
        tensors["weight_shape"] = torch.tensor([rows, size])
        with pytest.raises(UnsupportedValue, match=rf"stored shape of 'weight' .*\n  found .*\[{rows}, {size}\]"):
            form.dequantise(tensors)
        assert st.trace(form.dequantise, tensors)(tensors)["weight"].isnan().all()
    source, target = st.storage.MemoryStorage(), st.storage.MemoryStorage()
    st.save([st.ShardedTensor.from_rank_offsets(key, each) for key, each in tensors.items()], source)
    with pytest.raises(UnsupportedValue, match="the stored shape of 'weight' differs from the shape of its unpacked"):
        st.convert(source, target, backend="huggingface", transform=recode(torch.bfloat16))
    assert not st.is_checkpoint(target)


def test_groups_of_another_size_are_named_and_nothing_else() -> None:
    tensors = stored("int4_packed", key="weight")
    tensors["weight_scale"] = tensors["weight_scale"].repeat(1, 4)
    tree = {key: st.ShardedTensor.from_rank_offsets(key, each) for key, each in tensors.items()}
    with pytest.raises(ShapeError) as caught:
        recode(torch.bfloat16)(tree)
    assert str(caught.value).split("\n")[1].startswith("  'weight': 'weight_scale': bfloat16 (20, 8), not bfloat16 or")
    assert "(20, 2)" in str(caught.value) and "without" not in str(caught.value)
    values, scale, shape = FORMS["int4_packed"].parts
    form = replace(FORMS["int4_packed"], parts=(values, replace(scale, per=(1, 32)), shape), block=(1, 32))
    assert torch.equal(recode(torch.bfloat16, forms=[form])(tree)["weight"].data, form.dequantise(tensors)["weight"])


def test_zeros_arent_left_out() -> None:
    tensors = stored("int4_packed_zeros", key="up.weight")
    assert FORMS["int4_packed"].dequantise(tensors) == {}
    tree = {key: st.ShardedTensor.from_rank_offsets(key, each) for key, each in tensors.items()}
    with pytest.raises(ShapeError, match=r"'up\.weight_packed': int32 beside 'up\.weight_scale'"):
        recode(torch.bfloat16, forms=[FORMS["int4_packed"]])(tree)


# What a reader of GPTQ's files does wrong.


def test_rows_in_another_order_arent_read_by_their_places() -> None:
    tensors, form = stored("gptq", key="weight"), FORMS["gptq_in_order"]
    with pytest.raises(UnsupportedValue, match="g_idx puts rows of 'weight' into other groups than the Form"):
        form.dequantise(tensors)
    assert st.trace(form.dequantise, tensors)(tensors)["weight"].isnan().any()  # a trace can't look at elements
    source, target = st.storage.MemoryStorage(), st.storage.MemoryStorage()
    st.save([st.ShardedTensor.from_rank_offsets(key, each) for key, each in tensors.items()], source)
    with pytest.raises(UnsupportedValue, match="puts rows of 'weight' into other groups"):
        st.convert(source, target, backend="huggingface", transform=recode(torch.bfloat16, forms=[form]))


@pytest.mark.parametrize("group", [-1, 3, 2**31 - 1])
def test_numbers_of_no_group_are_refused(group: int) -> None:
    tensors = stored("gptq", key="weight")
    tensors["g_idx"][200] = group
    with pytest.raises(UnsupportedValue, match=r"g_idx puts rows of 'weight' into other groups"):
        FORMS["gptq"].dequantise(tensors)


@pytest.mark.slow
def test_scales_that_are_cut_as_rows_in_any_order_are_found() -> None:
    form, tensors = FORMS["gptq"], stored("gptq", key="mlp.weight")

    def fault(shard: st.ShardedTensor) -> dict[str, torch.Tensor]:
        own, low = held(form, shard, tensors), shard.global_offset[1] // 128
        scales = own["mlp.scales"][low : low + -(-shard.local_shape[1] // 128)]
        return own | {"mlp.scales": scales}

    assert check_quantised(form, tensors, held=lambda shard: held(form, shard, tensors))
    with pytest.raises(AssertionError, match=r"are not cut together: .*\n.*'mlp.scales'"):
        check_quantised(form, tensors, held=fault)


@pytest.mark.slow
def test_zeros_of_the_other_version_are_found() -> None:
    first, second = FORMS["gptq"], FORMS["gptq_v2"]
    tensors = stored("gptq", key="weight")
    tensors["qzeros"].fill_(0x77777777)
    weight = first.dequantise(tensors, torch.float32)["weight"]
    assert check_quantised(replace(first, block=(128, 1)), tensors, expected={"weight": weight}, most=1 / 32)
    with pytest.raises(AssertionError, match="scales are not the values' own"):
        check_quantised(second, tensors, expected={"weight": weight}, most=1 / 32)


# Names, dtypes and shapes that don't tell which form it is.


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (stored("gptq", key="weight"), "'weight': gptq, gptq_v2, gptq_in_order, gptq_v2_in_order"),
        (stored("fp8_rows", key="w") | {"w_scale_inv": torch.ones(1, 1)}, "'w': fp8_blocks, fp8_rows"),
    ],
)
def test_tensors_that_fit_several_forms_are_refused(tensors: dict[str, torch.Tensor], words: str) -> None:
    tree = {key: st.ShardedTensor.from_rank_offsets(key, each) for key, each in tensors.items()}
    with pytest.raises(ShapeError, match=f"recode: tensors that fit several forms\n  {words}"):
        recode(torch.bfloat16)(tree)


@pytest.mark.parametrize("name", [name for name in FORMS if not name.startswith("gptq")])
def test_names_dtypes_and_shapes_tell_the_other_forms(name: str) -> None:
    tree = {key: st.ShardedTensor.from_rank_offsets(key, each) for key, each in stored(name).items()}
    found = recode(torch.bfloat16)(tree)["mlp.weight"]
    assert first_difference(found.data, FORMS[name].dequantise(stored(name))["mlp.weight"]) is None


def test_forms_that_mean_the_same_of_a_small_weight_are_one() -> None:
    tensors = stored("int4_packed", key="weight")  # of one group, which is the row
    tensors |= {"weight_packed": tensors["weight_packed"][:, :16], "weight_scale": tensors["weight_scale"][:, :1]}
    tensors["weight_shape"] = torch.tensor([20, 128])
    tree = {key: st.ShardedTensor.from_rank_offsets(key, each) for key, each in tensors.items()}
    found = recode(torch.bfloat16)(tree)["weight"].data
    for name in ("int4_packed", "int4_packed_rows"):
        assert torch.equal(found, FORMS[name].dequantise(tensors)["weight"])


def test_scales_of_two_names_of_which_one_fits_are_taken() -> None:
    tensors = stored("fp8_rows", key="w") | {"w_scale_inv": torch.ones(5)}
    tree = {key: st.ShardedTensor.from_rank_offsets(key, each) for key, each in tensors.items()}
    found, expected = recode(torch.bfloat16)(tree), FORMS["fp8_rows"].dequantise(tensors)["w"]
    assert torch.equal(found["w"].data, expected) and set(found) == {"w", "w_scale_inv"}


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.encode is not None])
@pytest.mark.parametrize("size", [2.6e38, 3e38, torch.finfo(torch.float32).max])
def test_the_largest_numbers_saturate(name: str, size: float) -> None:
    weight = torch.zeros(128, 128)
    weight[0, :2] = torch.tensor([size, -size])
    form = FORMS[name]
    (found,) = form.dequantise(form.quantise({"w": weight}), torch.float32).values()
    most = 2.0**128 - 2.0 ** (126 if name == "mxfp4" else 124)  # of float32, with two or four bits
    assert found.isfinite().all() and found[0, 0] == -found[0, 1] and found[0, 0] > min(size, most) * 15 / 16
