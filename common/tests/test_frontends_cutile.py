"""Task 4's attention in cuTile: what can be checked without a GPU. Its results are checked in task4/frontends/test.py."""

import io

import pytest
import torch

ct = pytest.importorskip("cuda.tile")

from cuda.tile import compilation  # noqa: E402

from task4.frontends import cutile  # noqa: E402


def signature(dtype, *constants):
    per_16_bytes = 128 // dtype.bitwidth
    array = compilation.ArrayConstraint(
        dtype, 4, index_dtype=ct.int32, stride_lower_bound_incl=0, alias_groups=(), may_alias_internally=False,
        stride_constant=(None, None, None, 1), stride_divisible_by=(per_16_bytes,) * 3 + (1,), base_addr_divisible_by=16,
    )  # fmt: skip
    lengths = compilation.ArrayConstraint(
        ct.int32, 1, index_dtype=ct.int32, stride_lower_bound_incl=0, alias_groups=(), may_alias_internally=False
    )  # fmt: skip
    scale = compilation.ScalarConstraint(ct.float32)
    arguments = [*[array] * 4, lengths, lengths, scale, *constants]
    return compilation.KernelSignature(
        arguments, compilation.CallingConvention.cutile_python_v1(), "attention"
    )


@pytest.mark.parametrize("dtype", [ct.float32, ct.float16, ct.bfloat16])
@pytest.mark.parametrize("masks", [(False, False, False), (True, True, True)])
def test_it_compiles_for_hopper(dtype, masks):
    B_r, B_c, warps = cutile.TILES[dtype.bitwidth // 8][-1]
    kernel = cutile._with_warps(cutile._kernel, warps)
    cubin = io.BytesIO()
    try:
        compilation.export_kernel(
            kernel, [signature(dtype, 2, 64, B_r, B_c, *masks)], cubin, gpu_code="sm_90", output_format="cubin"
        )  # fmt: skip
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert cubin.getvalue()[:4] == b"\x7fELF"


def test_large_arrays_have_a_kernel_with_64_bit_indices():
    small, large = (
        cutile._with_warps(kernel, 8)._annotated_function.parameter_annotations[0].array
        for kernel in (cutile._kernel, cutile._kernel_64)
    )
    assert small is None and large.index_dtype == ct.int64


def test_tensors_must_be_on_a_gpu():
    with pytest.raises(ValueError, match="runs on a GPU alone; got q .* on cpu"):
        cutile.flash_attention(*torch.zeros(3, 1, 4, 2, 8))
