"""What the CUDA-on-CPU layer provides, each thing against a plain computation; and its errors."""

import ctypes
import math
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common.build import KernelError, Kernels, builder, using
from common.cuda_on_cpu import Runtime

SOURCE = Path(__file__).parent / "kernels/features.cu"
TEXT = SOURCE.read_text()
_kernels = Kernels(__file__, "kernels/features.cu")
MODES = [
    dict(order=o, check=c, seed=7) for o in ("forward", "reverse", "random") for c in (False, True)
]


@pytest.fixture(params=MODES, ids=lambda m: m["order"] + ("-check" if m["check"] else ""))
def mode(request):
    with using(**request.param):
        yield request.param


def without_a_stream(mode, name: str, out: torch.Tensor) -> None:
    """Call a launcher directly: one that Python calls may not use the default stream, which these do."""
    mistake("FINE")  # sets the mode
    (path,) = builder.build([SOURCE], check=mode["check"])
    assert getattr(ctypes.CDLL(str(path)), name)(ctypes.c_void_p(out.data_ptr()), None) == 0
    assert runtime().take_error() is None


# ---- launches and shared memory


def test_grids_and_blocks_of_three_dimensions(mode):
    grid, block = (3, 2, 4), (4, 3, 2)
    out = torch.full((24, 24), -1, dtype=torch.int32)
    gx, gy, gz, bx, by, bz = *grid, *block
    _kernels.launch("launch_3d", out=out, gx=gx, gy=gy, gz=gz, bx=bx, by=by, bz=bz)
    b, t = torch.meshgrid(torch.arange(24), torch.arange(24), indexing="ij")
    assert torch.equal(out, (3_000_000 + b * 1000 + t).int())


def test_forms_of_a_launch(mode):
    out = torch.zeros(4, dtype=torch.int32)
    without_a_stream(mode, "launch_forms", out)
    assert out.tolist() == [7, 7, 5, 5]


def test_shared_memory(mode):
    out = torch.full((256,), math.nan)
    _kernels.launch("run_shared_declarations", out=out)
    t = torch.arange(128)
    expected = t.sum() + 2 * (127 - t) + t % 8 + 3 + 42
    assert torch.equal(out[:128], expected.float())
    assert (out[128:] == 1).all()  # alignments


def test_unwritten_shared_memory_is_nan():
    out = torch.zeros(8)
    _kernels.launch("run_unwritten", out=out)
    assert out.isnan().all()


def test_barriers(mode):
    out = torch.full((100, 4), -1, dtype=torch.int32)
    _kernels.launch("run_barriers", out=out)
    assert (out[:, :3] == torch.tensor([1, 0, 34])).all()
    assert (out[:64, 3] == 64).all() and (out[64:, 3] == -1).all()


# ---- warps


@pytest.mark.parametrize("width", [32, 16, 4])
@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.float64, torch.int64])
def test_shuffles(dtype, width):
    out = torch.full((64, 4), -1, dtype=dtype)
    number = [torch.int32, torch.float32, torch.float64, torch.int64].index(dtype)
    _kernels.launch("run_shuffles", out=out, dtype=number, width=width)
    t = torch.arange(64)
    first = t // width * width
    source = torch.stack(
        [
            first + 5 % width,
            torch.where(t - 3 >= first, t - 3, t),
            torch.where(t + 2 < first + width, t + 2, t),
            t ^ 1,
        ],
        dim=1,
    )
    assert torch.equal(out, (source * 3 + 1).to(dtype))


def test_votes_and_reductions(mode):
    out = torch.zeros((64, 12), dtype=torch.int32)
    _kernels.launch("run_votes", out=out)
    lanes = range(32)
    xor = 0
    for lane in lanes:
        xor ^= 1 << lane % 5
    every = 0xFFFFFFFF
    for t in range(64):
        lane = t % 32
        match = sum(1 << i for i in lanes if i // 10 == lane // 10)
        expected = [
            sum(1 << i for i in lanes if i % 3 == 0), 1, 0, None, 496, 15, -16 & every, every,
            xor, match, 16 if lane < 16 else 32, 0 if lane == 7 else every & ~(1 << 7),
        ]  # fmt: skip
        row = [x & every for x in out[t].tolist()]
        assert all(e is None or e == x for e, x in zip(expected, row, strict=True)), (t, row)
        assert row[3] >> lane & 1


def test_syncwarp_orders_memory(mode):
    out = torch.full((3, 64), -1, dtype=torch.int32)
    _kernels.launch("run_through_syncwarp", out=out)
    t = torch.arange(64)
    assert torch.equal(out, torch.stack([(t ^ 1) + r for r in range(3)]).int())


def test_atomics(mode):
    n = 200
    i = torch.tensor([0, 0, -9, 9, -1, 0, 0, 0, 0, -1], dtype=torch.int32)
    u, ull = torch.zeros(4, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    f, d = torch.zeros(1), torch.zeros(1, dtype=torch.float64)
    _kernels.launch("run_atomics", i=i, u=u, ull=ull, f=f, d=d)
    xor = 0
    for t in range(n):
        xor ^= 1 << t % 31
    expected = [n * (n - 1) // 2, -n, n - 6, 6 - n, ~0b1111111, (1 << 20) - 1, xor, 77, 55, 0]
    assert i.tolist() == expected
    down = 0
    for _ in range(n):
        down = 6 if down == 0 or down > 6 else down - 1
    assert u.tolist() == [n, n % 7, down, n]
    assert ull.item() == n << 33 and f.item() == n / 2 and d.item() == n / 4


def test_orders_of_threads():
    def order(**settings):
        out, start = torch.full((64,), -1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        with using(**settings):
            _kernels.launch("run_order", out=out, next=start)
        return out.tolist()

    assert order() == list(range(64))
    assert order(order="reverse") == list(range(63, -1, -1))
    one, again, other = (order(order="random", seed=s) for s in (1, 1, 2))
    assert one == again != other and sorted(one) == list(range(64))


# ---- host API, globals, intrinsics


def test_globals_and_host_api(mode):
    out = torch.full((8,), math.nan)
    without_a_stream(mode, "run_globals", out)
    assert out[:4].tolist() == [2, 3, 4, 0]
    assert out[4] >= 1 and out[5:].tolist() == [108, 163 * 1024, 4]  # sm_80, the default


def test_intrinsics():
    f, i = torch.zeros(15), torch.zeros(16, dtype=torch.int32)
    _kernels.launch("run_intrinsics", f=f, i=i)
    expected = [math.exp(1.5), 8, 0.25, 0.25, 10, 0.125, 2, 1, 2, 1, 1, 3, 0, 32, 2.5]
    assert torch.allclose(f, torch.tensor(expected))
    assert i.tolist() == [
        8, 31, 32, 4, -(2**31), 0x3F800000, 2, 3, 0x77552200, 2, 2, 3, 4, 64, 1, 0x30005,
    ]  # fmt: skip


# ---- launches that CUDA refuses


def runtime() -> Runtime:
    from common.build.builder import make
    from common.build.planner import cpu_runtime

    make([cpu_runtime()])
    return Runtime(cpu_runtime().path)


CONFIGURATIONS = [
    # grid, block, dynamic bytes, bytes asked for, message
    ((1, 1, 1), (1025, 1, 1), 0, -1, "a block has at most 1024 threads; this one has 1025"),
    ((1, 1, 1), (32, 33, 1), 0, -1, "a block has at most 1024 threads; this one has 1056"),
    ((1, 1, 1), (1, 1, 65), 0, -1, "the z dimension of a block is at most 64"),
    ((0, 1, 1), (32, 1, 1), 0, -1, "must be at least 1"),
    ((1, 1, 1), (0, 1, 1), 0, -1, "must be at least 1"),
    ((1, 65536, 1), (1, 1, 1), 0, -1, "y and z dimensions of a grid are at most 65535"),
    ((1, 1, 65536), (1, 1, 1), 0, -1, "y and z dimensions of a grid are at most 65535"),
    ((-1, 1, 1), (1, 1, 1), 0, -1, r"the x dimension of a grid is at most 2\^31 - 1"),
    ((1, 1, 1), (32, 1, 1), 49153, -1, r"have to be asked for with cudaFuncSetAttribute"),
    ((1, 1, 1), (32, 1, 1), 60001, 60000, "what was asked for is 60000"),
    ((1, 1, 1), (32, 1, 1), 0, 163 * 1024 + 1, "asks for 166913 bytes, and a block on sm_80"),
]


@pytest.mark.parametrize("grid, block, bytes, ask, message", CONFIGURATIONS)
def test_bad_configurations(grid, block, bytes, ask, message):
    if ask < 0:  # what one launch was granted would hold for the next
        runtime()
        config(1, 1, 0, 0)
    with pytest.raises(KernelError, match=message) as caught:
        config(grid, block, bytes, ask)
    if "asks for" not in message:
        assert re.search(r"features\.cu:\d+: invalid launch configuration", str(caught.value))
        assert "kernel nothing" in str(caught.value)


def config(grid, block, bytes, ask):
    gx, gy, gz = grid if isinstance(grid, tuple) else (grid, 1, 1)
    bx, by, bz = block if isinstance(block, tuple) else (block, 1, 1)
    out = torch.zeros(1, dtype=torch.uint8)
    _kernels.launch(
        "run_config", out=out, gx=gx, gy=gy, gz=gz, bx=bx, by=by, bz=bz, bytes=bytes, ask=ask
    )
    assert out.item() == 1


@pytest.mark.parametrize(
    "arch, kib", [(75, 64), (80, 163), (86, 99), (89, 99), (90, 227), (100, 227), (120, 99)]
)
def test_shared_memory_limit_of_the_architecture(arch, kib):
    try:
        runtime().configure(arch=f"sm_{arch}")
        config(1, 32, kib * 1024, kib * 1024)
        with pytest.raises(KernelError, match=f"a block on sm_{arch} has at most {kib * 1024}"):
            config(1, 32, kib * 1024 + 1, 0)
    finally:
        runtime().configure(arch="sm_80")


def test_static_shared_memory_limits():
    out = torch.zeros(1)

    def launch(which, dynamic, ask=-1):
        _kernels.launch("run_big_static", out=out, which=which, dynamic=dynamic, ask=ask)

    with pytest.raises(KernelError, match="static shared memory is at most 49152; use extern"):
        launch(1, 4)
    with pytest.raises(KernelError, match="49152 bytes static and 4 dynamic.*at most 49152"):
        launch(0, 4)
    launch(0, 64 * 1024, ask=64 * 1024)  # asked for: the two together may be 163 KiB
    with pytest.raises(KernelError, match="49152 bytes static and 122880 dynamic.*166912 on sm_80"):
        launch(0, 120 * 1024, ask=120 * 1024)


# ---- mistakes inside a kernel


def line_of(tag: str) -> str:
    (line,) = [i for i, line in enumerate(TEXT.splitlines(), 1) if line.endswith(f"// @{tag}")]
    return f"features.cu:{line}: "


NAMES = re.search(r"enum Mistake \{(.*?)\}", TEXT, re.DOTALL)[1].replace(",", " ").split()
FAST = [  # found by both builds
    (
        "DIVERGENT",
        r"divergent __syncthreads\(\): thread \(\d+,0,0\) waits at",
        "divergent-other divergent",
    ),
    ("DEADLOCK", r"at __syncwarp with mask 0xffffffff, .*features.cu:\d+", ""),
    ("OVERFLOW_STACK", "stack overflow: .* more than 192 KiB", ""),
    ("WILD", "illegal memory access at address 0x1000|which is in no tensor", "wild"),
    ("PAST_SHARED", "out of range: .*'x'", ""),
    ("LANE_NOT_IN_MASK", "lane 0 calls it with mask 0xfffffffe", "lane-not-in-mask"),
    ("TRAP", r"__trap\(\)", "trap"),
    ("ASSERTION", r"assertion failed: mistake != ASSERTION \|\| t < 7", "assertion"),
    ("GPU_ONLY", "wgmma.mma_async is for a GPU only", "gpu-only"),
    ("MASKS_DIFFER", "waits for lane|deadlock", ""),
]
if platform.machine() in ("x86_64", "AMD64"):  # arm64 divides by zero and goes on, as a GPU does
    FAST.append(("DIVIDE", "integer division by zero", "divide"))
CHECK = [  # found by the check build
    (
        "PAST_SHARED",
        r"out of range: writes 4 bytes of shared memory 'x', element 65 of 64, at byte 260",
        "past-shared",
    ),
    (
        "RACE_IN_WARP",
        r"race on x\[\d+\] .*no __syncthreads\(\) or __syncwarp\(\) between",
        "race-in-warp",
    ),
    ("SAME_OUTPUT", "race on out, byte 0", "same-output"),
    ("PLAIN_COUNTER", r"race on x\[0\] \((read after write|write after read)\)", "plain-counter"),
    ("HALF_SYNCWARP", r"race on x\[\d+\] ", "half-syncwarp half-syncwarp-write"),
    ("MEMCPY_PAST", "out of range: writes 64 bytes of shared memory 'x'", "memcpy-past"),
    (
        "BEFORE_TENSOR",
        "out of range: writes 4 bytes of tensor 'out' 8 bytes before its start",
        "before-tensor",
    ),
]


def test_a_mistake_in_a_helper_names_the_kernels_line():
    def number(tag):
        return line_of(tag).split(":")[1]

    inside = {
        "IN_HELPER": f" (in read_at, line {number('read-at')})",
        "IN_INLINED_HELPER": f" (in load4, line {number('load4')})",
        "IN_HELPERS_HELPER": f" (in read_past, line {number('read-past')}; in read_at, line {number('read-at')})",
        "IN_LAMBDA": f" (in a lambda, line {number('store')})",
        "IN_HEADER": "",  # a function of ptx.cuh is as good as an instruction
    }
    for name, helpers in inside.items():
        with using(check=True), pytest.raises(KernelError) as caught:
            mistake(name, blocks=1)
        line = number(name.lower().replace("_", "-"))
        start = f"common/tests/kernels/features.cu:{line}{helpers}: out of range: "
        assert str(caught.value).startswith(start), str(caught.value)


@pytest.mark.parametrize("order", ["forward", "reverse"])
@pytest.mark.parametrize(
    "which, element", list(enumerate(["A[1][2]", "B[7]", "C[5]", "D_s[2][3]", "C[1]"]))
)
def test_parts_of_the_dynamic_shared_memory_have_names(which, element, order):
    with using(check=True, order=order), pytest.raises(KernelError) as caught:
        _kernels.launch("run_parts", out=torch.zeros(2), which=which)
    assert f" race on {element} (write after write): " in str(caught.value)


def mistake(name: str, n: int = 2, zero: int = 0, blocks: int = 2) -> torch.Tensor:
    out = torch.full((blocks, 64), math.nan)
    number = NAMES.index(name)
    _kernels.launch("run_mistakes", out=out, mistake=number, blocks=blocks, n=n, zero=zero)
    return out


@pytest.mark.parametrize("name, message, tags", FAST, ids=[m[0] for m in FAST])
def test_mistakes_that_every_build_finds(mode, name, message, tags):
    check_mistake(name, message, tags)


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
@pytest.mark.parametrize("name, message, tags", CHECK, ids=[m[0] for m in CHECK])
def test_mistakes_that_the_check_build_finds(order, name, message, tags):
    with using(check=True, order=order):
        check_mistake(name, message, tags)


def check_mistake(name, message, tags):
    with pytest.raises(KernelError) as caught:
        mistake(name)
    text = str(caught.value)
    assert re.search(message, text), text
    if tags:
        assert any(line_of(tag) in text.splitlines()[0] for tag in tags.split()), text
    assert re.search(r"kernel mistakes, block \(\d+,0,0\).*launched at .*features.cu:\d+", text), (
        text
    )
    assert (mistake("FINE") == 0).all()  # the process goes on as if nothing had happened


# ---- the process around it


def test_errors_do_not_outlive_their_launch():
    with pytest.raises(KernelError):
        mistake("TRAP")
    assert runtime().take_error() is None


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_can_launch():
    with using(threads=2):
        mistake("FINE")  # the pool's threads exist now, and will not in the child
        child = os.fork()
        if child == 0:
            os._exit(0 if (mistake("FINE", blocks=8) == 0).all() else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_launches_from_several_python_threads():
    from concurrent.futures import ThreadPoolExecutor

    def one(i):
        if i % 2 == 0:
            return (mistake("FINE", blocks=4) == 0).all().item()
        with pytest.raises(KernelError, match="__trap"):
            mistake("TRAP", blocks=4)
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(one, range(40)))


def test_architecture_from_the_environment():
    code = (
        "from common.tests.test_cuda_on_cpu import config\nconfig(1, 32, 227 * 1024, 227 * 1024)\n"
    )
    environment = {**os.environ, "CUDA_ON_CPU_ARCH": "sm_90a"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_settings_are_checked():
    for wrong in (dict(order="sideways"), dict(arch="sm_42"), dict(threads=-1), dict(limit=-1)):
        with pytest.raises(ValueError):
            runtime().configure(**wrong)
