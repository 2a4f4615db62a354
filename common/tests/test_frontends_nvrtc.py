"""Task 4's kernel by NVRTC: what can be checked without a GPU. Its results are checked in task4/frontends/test.py."""

from unittest import mock

import pytest
import torch

pytest.importorskip("cuda.core")
pathfinder = pytest.importorskip("cuda.pathfinder")
try:
    pathfinder.load_nvidia_dynamic_lib("nvrtc")
except RuntimeError as error:
    pytest.skip(f"no NVRTC: {error}", allow_module_level=True)

from task4.attention import TILES  # noqa: E402
from task4.frontends import nvrtc, registers  # noqa: E402
from task4.frontends.nvrtc import Variant, compile_variant  # noqa: E402

ARCH = "sm_90a"


@pytest.mark.parametrize("dtype", nvrtc.TYPES)
def test_task_4s_tiles_compile_and_do_not_spill(dtype):
    for head_dim, tiles in TILES.items():
        for tile in tiles:
            compiled = compile_variant(Variant(*tile, head_dim, dtype), ARCH)
            assert compiled.code.code[:4] == b"\x7fELF"
            assert 0 < compiled.registers <= 255  # of a thread at most; 254 and 255 were both seen
            assert compiled.spill_stores == compiled.spill_loads == 0


def test_fewer_registers_are_spilled():
    free, half, quarter = (compile_variant(Variant(128, 64, 64, blocks=n), ARCH) for n in (1, 2, 4))
    assert free.registers > half.registers == 128 > quarter.registers == 64
    assert 0 == free.spill_stores < half.spill_stores < quarter.spill_stores


def test_the_report_needs_no_gpu():
    with mock.patch.object(torch.cuda, "is_available", return_value=False):
        found = registers.register_report()
    assert [taken.compiled.variant for taken in found] == list(registers.VARIANTS)
    assert {(taken.blocks_per_sm, taken.ms, taken.ratio) for taken in found} == {(None, None, None)}


def test_sizes_that_are_not_those_of_the_cu_do_not_compile():
    with (
        mock.patch.object(Variant, "shared_bytes", 1),
        pytest.raises(Exception, match=r"nvrtc\.Variant\.shared_bytes"),
    ):
        compile_variant(Variant(48, 16, 64), ARCH)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "runs on a GPU alone; got q .* on cpu"),
        ({"q": torch.zeros(1, 4, 2, 200)}, "k must be"),
        ({"v": torch.zeros(1, 5, 2, 8)}, "v must be"),
    ],
)  # fmt: skip
def test_bad_input(change, message):
    given = {name: torch.zeros(1, 4, 2, 8) for name in "qkv"} | change
    with pytest.raises(ValueError, match=message):
        nvrtc.flash_attention(**given)
