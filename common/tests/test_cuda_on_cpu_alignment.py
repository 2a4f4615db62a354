"""Vector accesses at addresses that a GPU faults on."""

import platform
import re
from pathlib import Path

import pytest
import torch

from common.build import KernelError, Kernels, using

SOURCE = Path(__file__).parent / "kernels/alignment.cu"
TEXT = SOURCE.read_text()
_kernels = Kernels(__file__, "kernels/alignment.cu")
ACCESSES = re.search(r"enum Access \{(.*?)\}", TEXT, re.DOTALL)[1].replace(",", " ").split()

# What the check build says at an offset of one element.
WORDS = {
    "READ_FLOAT4": "misaligned: reads a float4 of tensor 'x' at byte 4, which is not a multiple of 16",
    "WRITE_FLOAT4": "misaligned: writes a float4 of tensor 'x' at byte 4, which is not a multiple of 16",
    "COPY_FLOAT4": "misaligned: reads a float4 of tensor 'x' at byte 4, which is not a multiple of 16",
    "READ_FLOAT2": "misaligned: (reads|uses) a float2 of tensor 'x' at byte 12, which is not a multiple of 8",
    "READ_INT4": "misaligned: reads an int4 of tensor 'x' at byte 4, which is not a multiple of 16",
    "READ_UINT4": "misaligned: reads a uint4 of tensor 'h' at byte 2, which is not a multiple of 16",
    "READ_HALF2": "misaligned: reads a .*half2.* of tensor 'h' at byte 2, which is not a multiple of 4",
    "WRITE_BFLOAT162": "misaligned: writes a .*__nv_bfloat162 of tensor 'h' at byte 2, which is not a multiple of 4",
    "MEMBER": "misaligned: uses a float4 of tensor 'x' at byte 4, which is not a multiple of 16",
    "READ_SHARED": r"misaligned: reads a float4 of shared memory 'tile' at byte 148 \(tile\[1\]\[1\]\), "
    "which is not a multiple of 16",
    "WRITE_SHARED": r"misaligned: writes an int4 of shared memory 'tile' at byte 148 \(tile\[1\]\[1\]\), "
    "which is not a multiple of 16",
    "COPY_TO_SHARED": r"cp_async<16>: the shared address, in shared memory 'tile' at byte 148 \(tile\[1\]\[1\]\), "
    "is not a multiple of 16 bytes",
    "COPY_FROM_TENSOR": "cp_async<16>: the global address, in tensor 'x' at byte 4, is not a multiple of 16 bytes",
}


def access(name: str, offset: int, x: torch.Tensor | None = None) -> None:
    x = torch.zeros(64) if x is None else x
    h, out = torch.zeros(64, dtype=torch.float16), torch.zeros(1)
    _kernels.launch("run_vectors", x=x, h=h, out=out, access=ACCESSES.index(name), offset=offset)


def place(name: str) -> str:
    (line,) = [i for i, line in enumerate(TEXT.splitlines(), 1) if line.endswith(f"// @{name}")]
    return f"common/tests/kernels/alignment.cu:{line}: "


@pytest.mark.parametrize("name", ACCESSES)
def test_the_check_build_names_a_misaligned_access(name):
    with using(check=True):
        access(name, 0)
        if name not in WORDS:
            return access(name, 1)
        with pytest.raises(KernelError) as caught:
            access(name, 1)
    first = str(caught.value).splitlines()[0]
    assert re.fullmatch(re.escape(place(name)) + WORDS[name], first), first


def test_a_tensor_that_begins_at_an_odd_place():
    x = torch.zeros(80)
    offset = next(i for i in range(4) if (x.data_ptr() + 4 * i) % 16 == 4)
    words = "of tensor 'x' at byte 16, and the tensor begins 4 bytes after a multiple of 16"
    with using(check=True), pytest.raises(KernelError, match=words):
        access("READ_FLOAT4", 4, x[offset:])


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="others allow it")
@pytest.mark.parametrize("name", ["WRITE_FLOAT4", "COPY_FLOAT4", "WRITE_SHARED"])
def test_the_fast_build_says_what_it_probably_was(name):
    words = "probably a misaligned vector access: a float4 must be at a multiple of 16 bytes; the check build names the"
    with pytest.raises(KernelError) as caught:
        access(name, 1)
    assert f"{place(name)}{words}" in str(caught.value)
    access(name, 0)
