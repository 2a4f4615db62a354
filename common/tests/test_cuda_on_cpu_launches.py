"""Launches on the CPU: their limit of time, their stream, and what they are known to have done."""

import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from common.build import KernelError, Kernels, library, using
from common.tests.kernel_file import KernelFile

FILE = KernelFile("launches.cu")
names, line_of = FILE.names, FILE.line_of
_kernels = Kernels(__file__, "kernels/launches.cu")


# ---- the limit of time


def endless(loop: str, blocks: int = 3, go: int = 0, **settings) -> torch.Tensor:
    out, go = torch.zeros(64 * blocks), torch.full((1,), go, dtype=torch.int32)
    number = names("Loop").index(loop)
    with using(**settings):
        _kernels.launch("run_endless", go=go, out=out, loop=number, rounds=-1, blocks=blocks)
    return out


@pytest.mark.parametrize("check", [False, True], ids=["fast", "check"])
@pytest.mark.parametrize("loop", names("Loop")[1:])
def test_an_endless_kernel_fails(loop, check):
    endless("NONE", check=check)  # builds
    began = time.monotonic()
    with pytest.raises(KernelError) as caught:
        endless(loop, check=check, limit=0.2)
    assert 0.2 <= time.monotonic() - began < 10
    first, second = str(caught.value).splitlines()
    thread = 40 if loop == "ONE_THREAD" else r"\d+"
    where = re.fullmatch(
        rf"did not end within 0\.2 s: thread \({thread},0,0\) of block \([012],0,0\) is at ([^ ,]+)(.*)",
        first,
    )
    assert where, first
    assert second == f"  in kernel endless, launched at {line_of('launch')}"
    if check or loop in ("BARRIERS", "SHUFFLES"):
        assert where[1] == line_of(loop), first
    # where threads switch the fast build knows the line, but the limit may end the loop in between
    assert where[2] in ("", "" if check else ", or near it; with --check the line is exact"), first
    assert torch.equal(endless("NONE", blocks=1, check=check), torch.arange(64.0))


def test_a_kernel_of_many_blocks_fails_in_a_block_or_between_two():
    where = r"(\d+ of 2147483647 blocks|thread \(0,0,0\) of block)"
    with (
        using(limit=0.2),
        pytest.raises(KernelError, match=rf"did not end within 0\.2 s: {where}"),
    ):
        _kernels.launch("run_many_blocks", out=torch.zeros(1, dtype=torch.int32))


def test_the_kernels_of_a_launch_share_its_time():
    go = torch.zeros(1, dtype=torch.int32)

    def launch(kernels: int, rounds: int) -> float:
        began = time.monotonic()
        _kernels.launch("run_one_after_the_other", go=go, kernels=kernels, rounds=rounds)
        return time.monotonic() - began

    launch(1, 1)
    rounds = int(0.15 / launch(1, 10_000_000) * 10_000_000)  # 0.15 s
    with using(limit=3):
        for _ in range(25):  # together more than the limit
            launch(1, rounds)
        with pytest.raises(KernelError, match="did not end within 3 s"):
            launch(10_000, rounds)


def test_endless_kernels_of_several_threads():
    def one(i):
        if i % 2 == 0:
            return torch.equal(endless("NONE", blocks=1), torch.arange(64.0))
        with pytest.raises(KernelError, match="did not end within 0.1 s"):
            endless("VOLATILE")
        return True

    with using(limit=0.1), ThreadPoolExecutor(4) as pool:
        assert all(pool.map(one, range(12)))


def test_the_limit_holds_for_contexts_inside():
    with using(limit=2), using(check=True):
        assert library.settings().limit == 2
        with using(limit=0):
            assert library.settings().limit == 0
    assert library.settings().limit == 0
    with pytest.raises(ValueError, match="limit must be 0"), using(limit=-1):
        pass


# ---- the stream


def streams(wrong: str) -> torch.Tensor:
    x = torch.zeros(4)
    _kernels.launch("run_streams", x=x, wrong=names("Wrong").index(wrong))
    return x


DEFAULT = "the default stream; the launcher was given one: "
STREAMS = {
    "KERNEL": f"add<1> is launched on {DEFAULT}<<<grid, block, bytes, stream>>>",
    "LEGACY": f"add<1> is launched on {DEFAULT}<<<grid, block, bytes, stream>>>",
    "OTHER": "add<1> is launched on another stream than the launcher was given: "
    "<<<grid, block, bytes, stream>>>",
    "MEMSET": f"cudaMemset runs on {DEFAULT}cudaMemsetAsync(..., stream)",
    "MEMCPY": f"cudaMemcpy runs on {DEFAULT}cudaMemcpyAsync(..., stream)",
    "MEMSET_ASYNC": f"cudaMemsetAsync runs on {DEFAULT}cudaMemsetAsync(..., stream)",
    "MEMCPY_ASYNC": f"cudaMemcpyAsync runs on {DEFAULT}cudaMemcpyAsync(..., stream)",
    "MALLOC_ASYNC": f"cudaMallocAsync runs on {DEFAULT}cudaMallocAsync(..., stream)",
    "TO_SYMBOL": f"cudaMemcpyToSymbol runs on {DEFAULT}cudaMemcpyToSymbolAsync(..., stream)",
    "SYNCHRONIZE": "cudaDeviceSynchronize() waits for everything on the GPU, and not only for the stream that the "
    "launcher was given; a launcher starts its kernels and returns",
}


@pytest.mark.parametrize("check", [False, True], ids=["fast", "check"])
@pytest.mark.parametrize("wrong", names("Wrong")[1:])
def test_work_on_another_stream_is_an_error(wrong, check):
    with using(check=check), pytest.raises(KernelError) as caught:
        streams(wrong)
    assert str(caught.value) == f"{line_of(wrong)}: {STREAMS[wrong]}"


# ---- what was launched


def test_what_a_launch_did_is_known():
    with pytest.raises(KernelError, match="at most 1024 threads"):
        streams("RIGHT")
    assert library.launched() == ["add<1>", "kernel"] and library.allocated() == 116
    assert library.launched() == [] and library.allocated() == 0
    endless("NONE", blocks=1)
    endless("NONE", blocks=1)
    assert library.launched() == ["endless"]  # of the last launch
    with ThreadPoolExecutor(1) as pool:
        endless("NONE", blocks=1)
        assert pool.submit(library.launched).result() == []  # of this thread
    assert library.launched() == ["endless"] and library.allocated() == 0
