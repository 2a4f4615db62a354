"""Hopper's instructions on the CPU layer: results against PyTorch, mistakes named by file and line, and races."""

import math
import re

import pytest
import torch

from common.build import KernelError, Kernels, dtype_code, using
from common.tests.kernel_file import KernelFile

FILE = KernelFile("hopper.cu")
names, line_of = FILE.names, FILE.line_of
_hopper = Kernels(__file__, "kernels/hopper.cu")
HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
ORDERS = ("forward", "reverse", "random")
MODES = [
    dict(order=order, eager_copies=eager, seed=3) for order in ORDERS for eager in (False, True)
]
LAZY = [mode for mode in MODES if not mode["eager_copies"]]
EAGER = [mode for mode in MODES if mode["eager_copies"]]

both_builds = pytest.mark.parametrize("check", [False, True], ids=["fast", "check"])


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def nan(*shape: int) -> torch.Tensor:
    return torch.full(shape, math.nan)


# ---- TMA


def swizzled(tile: torch.Tensor) -> torch.Tensor:
    """A tile (parts, rows, 128 bytes) as TMA stores it: 16-byte chunk c of row r is chunk c ^ (r % 8)."""
    chunks = tile.reshape(-1, 8, tile.shape[-1] // 8)
    rows = torch.arange(len(chunks)).view(-1, 1)
    return chunks[rows, torch.arange(8) ^ rows % 8].reshape(tile.shape)


def box_of(x: torch.Tensor, rows: int, at: tuple[int, int, int, int]) -> torch.Tensor:
    """The box (parts, rows, 128 bytes) of x (batch, rows, heads, head_dim) at (row, part, head, batch)."""
    row, part, head, b = at
    width = 128 // x.element_size()
    parts = x.shape[3] // width
    box = torch.zeros(parts, rows, width)
    for p in range(parts):
        for r in range(rows):
            inside = 0 <= row + r < x.shape[1] and 0 <= part + p < parts
            if inside and 0 <= head < x.shape[2] and 0 <= b < x.shape[0]:
                begin = (part + p) * width
                box[p, r] = x[b, row + r, head, begin : begin + width].float()
    return box


def load_box(x: torch.Tensor, rows: int, at: tuple[int, int, int, int]) -> torch.Tensor:
    seen = nan(x.shape[3] * x.element_size() // 128, rows, 128 // x.element_size())
    row, part, head, b = at
    _hopper.launch(
        "run_load_box", dtype=dtype_code(x.dtype), x=x, seen=seen, box_rows=rows, row=row, part=part, head=head, b=b
    )  # fmt: skip
    return seen


TENSORS = {  # (2, 37, 3, 128)
    "contiguous": lambda dtype: torch.randn(2, 37, 3, 128).to(dtype),
    "every second row": lambda dtype: torch.randn(2, 74, 5, 136).to(dtype)[:, ::2, 1:4, :128],
    "heads first": lambda dtype: torch.randn(2, 3, 37, 128).to(dtype).transpose(1, 2),
}
BOXES = [  # row, part, head, batch; from the sixth on partly or wholly outside
    *((0, 0, 0, 0), (16, 0, 2, 1), (3, 0, 1, 1), (13, 0, 0, 0), (21, 0, 2, 0)),
    *((30, 0, 1, 1), (-5, 0, 1, 0), (-20, 0, 0, 0), (37, 0, 0, 0), (3, 1, 1, 1), (35, 1, 2, 1)),
    *((0, -1, 0, 0), (0, 9, 0, 0), (0, 0, -1, 0), (0, 0, 3, 1), (0, 0, 0, 2), (0, 0, 0, -1)),
]


@both_builds
@pytest.mark.parametrize("layout", TENSORS)
@pytest.mark.parametrize("dtype", [FLOAT, HALF, BFLOAT])
def test_a_box_arrives_swizzled_with_zeros_outside(dtype, layout, check):
    x = TENSORS[layout](dtype)
    for i, at in enumerate(BOXES):
        for mode in MODES if i in (1, 5) else [MODES[i % 6]]:
            with using(check=check, **mode):
                assert torch.equal(load_box(x, 16, at), swizzled(box_of(x, 16, at))), (at, mode)
    assert torch.equal(load_box(x, 24, (20, 0, 1, 1)), swizzled(box_of(x, 24, (20, 0, 1, 1))))


@both_builds
@pytest.mark.parametrize("columns", [20, 32, 48])
def test_a_box_that_is_wider_than_the_tensor_and_not_swizzled(columns, check):
    x, seen = torch.randn(21, 48)[:, :columns], nan(8, 32)
    for i, row in enumerate((0, 3, 17, -2)):
        with using(check=check, **MODES[i]):
            _hopper.launch("run_load_narrow", x=x, seen=seen, box_rows=8, row=row)
        truth = torch.zeros(8, 32)
        inside = [r for r in range(8) if 0 <= row + r < 21]
        truth[inside, : min(columns, 32)] = x[[row + r for r in inside], :32]
        assert torch.equal(seen, truth)


@both_builds
@pytest.mark.parametrize("dtype", [FLOAT, HALF, BFLOAT])
def test_rows_past_the_end_are_not_stored(dtype, check):
    x = torch.randn(2, 37, 3, 64).to(dtype)
    for mode in MODES:
        whole = torch.full((2, 50, 5, 64), math.nan, dtype=dtype)
        out = whole[:, 3:40, 1:4]
        with using(check=check, **mode):
            _hopper.launch("run_store_boxes", dtype=dtype_code(dtype), x=x, out=out, waits=1)
        assert torch.equal(out, 2 * x)
        assert whole.isnan().sum() == whole.numel() - out.numel()


@both_builds
def test_a_store_reads_its_tile_until_tma_store_wait(check):
    x, out = torch.randn(1, 48, 1, 64), nan(1, 48, 1, 64)
    for mode in MODES:
        with using(check=check, **mode):
            _hopper.launch("run_store_boxes", dtype=dtype_code(FLOAT), x=x, out=out, waits=0)
        assert torch.equal(out, 2 * x) == mode["eager_copies"]
        assert torch.equal(out[:, 16:], 2 * x[:, 16:])


@pytest.mark.parametrize(
    "x, rows, says",
    [
        (torch.randn(1, 8, 1, 72)[..., 1:65], 8, "the address must be a multiple of 16 bytes"),
        (torch.randn(1, 8, 1, 66)[..., :64], 8, "pitch 0 must be a multiple of 16 bytes .* 264"),
        (
            torch.randn(1025).as_strided((2, 8, 1, 64), (513, 64, 64, 1)),
            8,
            "pitch 3 must be a multiple of 16 bytes .* 2052",
        ),
        (torch.randn(1, 300, 1, 64), 257, "from 1 to 256 elements of dimension 1; got 257"),
    ],
    ids=["address", "pitch", "batch pitch", "box"],
)
def test_maps_that_tma_does_not_take_are_refused(x, rows, says):
    with pytest.raises(KernelError, match=f"cuTensorMapEncodeTiled: .*{says}"):
        load_box(x, rows, (0, 0, 0, 0))


# ---- a ring of stages


def ring(mistake: str, bulk: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, out = torch.randn(8, 512), nan(8, 512)
    number = names("Ring").index(mistake)
    _hopper.launch("run_ring", x=x, out=out, tiles=8, bulk=bulk, mistake=number)
    return out, x


@both_builds
@pytest.mark.parametrize("bulk", [0, 1], ids=["tma", "bulk"])
def test_a_ring_of_stages(bulk, check):
    for mode in MODES:
        with using(check=check, **mode):
            assert torch.equal(*ring("RING", bulk))


@pytest.mark.parametrize("bulk", [0, 1], ids=["tma", "bulk"])
@pytest.mark.parametrize(
    "mistake, says",
    [
        ("NO_WAIT_FOR_FULL", "uninitialised|in flight|read after write"),
        ("WAITS_FOR_FULL_TWICE", r"race on stages\[\d\].*(write after read|in flight)"),
        (
            "ARRIVES_BEFORE_READING",
            r"race on stages\[\d\].*(write after read|in flight|read after write)",
        ),
        ("NO_SYNCWARP", r"race on stages\[\d\].*(write after read|in flight|read after write)"),
    ],
)
def test_check_build_sees_races_of_a_ring(mistake, says, bulk):
    for mode in MODES:
        if mistake == "WAITS_FOR_FULL_TWICE" and mode["eager_copies"]:
            continue  # all tiles are loaded before a reader comes, which then waits for a phase that is long over
        with using(check=True, **mode), pytest.raises(KernelError, match=says) as caught:
            ring(mistake, bulk)
        first = str(caught.value).splitlines()[0]
        places = [line_of("ring read"), line_of("bulk load" if bulk else "tma load")]
        assert any(re.search(rf"{place}\b", first) for place in places), first
    with using(check=True):
        assert torch.equal(*ring("RING", bulk))  # the next launch is as good as ever


# ---- wgmma


def product(
    dtype: torch.dtype,
    N: int,
    trans_b: int = 0,
    a_in_registers: int = 0,
    add: int = 1,
    mistake: str = "PRODUCT",
) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = torch.randn(64, 64).to(dtype).float(), torch.randn(64, N).to(dtype).float()
    c, d = torch.randn(64, N), nan(64, N)
    _hopper.launch(
        "run_product", dtype=dtype_code(dtype), N=N, a=a, b=b, c=c, d=d, trans_b=trans_b,
        a_in_registers=a_in_registers, add=add, mistake=names("Product").index(mistake),
    )  # fmt: skip
    return d, a.double() @ b.double() + add * c.double()


def is_near(out: torch.Tensor, truth: torch.Tensor) -> bool:
    return bool((out - truth).abs().max() < 1e-4)  # NaN is not


@both_builds
@pytest.mark.parametrize("N", [8, 24, 64, 80, 256])
@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
def test_wgmma(dtype, N, check):
    for i in range(8):
        for mode in (LAZY[i % 3], EAGER[i % 3]):
            with using(check=check, **mode):
                assert is_near(*product(dtype, N, i & 1, i >> 1 & 1, i >> 2)), (i, mode)


@both_builds
def test_wgmma_with_tma_and_mbarriers(check):
    a, b, d = (
        torch.randn(1, 64, 1, 320).to(BFLOAT),
        torch.randn(1, 32, 1, 320).to(BFLOAT),
        nan(64, 32),
    )
    for mode in MODES:
        with using(check=check, **mode):
            _hopper.launch("run_pipeline", a=a, b=b, d=d.fill_(math.nan))
        assert is_near(d, a[0, :, 0].double() @ b[0, :, 0].double().T)


@both_builds
def test_a_product_is_not_there_before_wgmma_wait(check):
    for mode in MODES:
        with using(check=check, **mode):
            for add in (0, 1):
                out, truth = product(HALF, 64, add=add, mistake="READS_BEFORE_WAITING")
                assert is_near(out, truth) == mode["eager_copies"]
                assert out.isnan().all() == (not mode["eager_copies"] and not add)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(
    "mistake, tag", [("OVERWRITES_B", "overwrite"), ("OVERWRITES_BY_TMA", "overwrite by copy")]
)
def test_check_build_sees_an_operand_overwritten_before_wgmma_wait(mistake, tag, mode):
    with using(check=True, **mode), pytest.raises(KernelError, match=r"race on B\[") as caught:
        product(HALF, 64, mistake=mistake)
    first = str(caught.value).splitlines()[0]
    assert re.search(rf"{line_of(tag)}\b", first)
    assert any(
        re.search(rf"{line_of(reader)}\b", first)
        for reader in ("wgmma", "wait for one", "wait for all")
    )


@both_builds
def test_wgmma_needs_whole_warps(check):
    for mode in MODES:
        says = r"wgmma needs all 32 lanes of the warp; [123]?\d are there"
        with using(check=check, **mode), pytest.raises(KernelError, match=says) as caught:
            product(HALF, 64, mistake="LANES_LEAVE")
        assert str(caught.value).startswith(line_of("wgmma"))


# ---- stmatrix


def stmatrix(transposed: int, shift: int = 0, wait: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    x, out = torch.randint(-100, 100, (4, 8, 8)).float(), nan(2 if transposed else 4, 8, 8)
    _hopper.launch("run_stmatrix", x=x, out=out, transposed=transposed, shift=shift, wait=wait)
    return out, x[:2].transpose(1, 2) if transposed else x


@both_builds
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("transposed, tag", [(0, "stmatrix"), (1, "stmatrix transposed")])
def test_stmatrix(transposed, tag, order, check):
    with using(check=check, order=order):
        assert torch.equal(*stmatrix(transposed))
        with pytest.raises(KernelError, match="of a row is not a multiple of 16 bytes") as caught:
            stmatrix(transposed, shift=8)
        assert str(caught.value).startswith(f"{line_of(tag)}: stmatrix: ")
        with pytest.raises(KernelError, match="of a row is not in shared memory") as caught:
            stmatrix(transposed, shift=1 << 20)
        assert str(caught.value).startswith(f"{line_of(tag)}: stmatrix: ")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("transposed, tag", [(0, "stmatrix"), (1, "stmatrix transposed")])
def test_check_build_sees_what_stmatrix_writes(transposed, tag, order):
    with (
        using(check=True, order=order),
        pytest.raises(KernelError, match="race on matri") as caught,
    ):
        stmatrix(transposed, wait=0)
    assert re.match(line_of("read matrices"), str(caught.value))
    assert re.search(rf"{line_of(tag)}\b", str(caught.value))


# ---- data from some warps to others


def hand_over(way: str) -> tuple[torch.Tensor, torch.Tensor]:
    x, out = torch.randn(5, 64), nan(5, 64)
    _hopper.launch("run_hand_over", x=x, out=out, rounds=5, way=names("Way").index(way))
    return out, x.flip(1)


@both_builds
@pytest.mark.parametrize("way", ["NAMED_BARRIERS", "MBARRIERS"])
def test_barriers_order_what_warps_hand_over(way, check):
    for mode in MODES:
        with using(check=check, **mode):
            assert torch.equal(*hand_over(way))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "way, says", [("NOTHING", "race on box|uninitialised"), ("GIVES_BACK_EARLY", "race on box")]
)
def test_check_build_sees_what_no_barrier_orders(way, says, order):
    with using(check=True, order=order), pytest.raises(KernelError, match=says) as caught:
        hand_over(way)
    assert re.match(f"({line_of('box read')}|{line_of('box write')}): ", str(caught.value))


# ---- mistakes

MISTAKES = [  # which, the line, what is said, in which build; "lazy": only with copies that land late
    ("ARRIVE_WITHOUT_INIT", "arrive", "mbarrier_arrive: the mbarrier is not initialised", ""),
    (
        "UNORDERED_INIT",
        "wait",
        "race on barrier.*read after write|mbarrier_wait: the mbarrier is not initialised",
        "check",
    ),
    ("WAIT_WITHOUT_INIT", "wait", "mbarrier_wait: the mbarrier is not initialised", ""),
    ("COPY_WITHOUT_INIT", "load", "tma_load: the mbarrier is not initialised", ""),
    ("NOT_SHARED", "arrive", "mbarrier_arrive: the mbarrier is not in shared memory", ""),
    ("COPY_TO_NO_MBARRIER", "load", "tma_load: the mbarrier is not in shared memory", ""),
    ("MISALIGNED_MBARRIER", "arrive", "the mbarrier is not at a multiple of 8 bytes", ""),
    ("NO_ARRIVALS", "init", "mbarrier_init: a phase waits for 1 to 1048575 arrivals; got 0", ""),
    ("WRONG_PARITY", "wait", "mbarrier_wait: parity is 0 or 1; got 2", ""),
    (
        "TOO_MANY_ARRIVALS",
        "arrive again",
        "mbarrier_arrive: more arrivals than the phase waits for",
        "",
    ),
    ("MISSING_ARRIVAL", "wait", "deadlock.*parity 0; phase 0 misses 1 of 2 arrivals\n", ""),
    (
        "MISSING_BYTES",
        "wait",
        "deadlock.*parity 0; phase 0 misses 0 of 1 arrivals and 1024 bytes\n",
        "",
    ),
    (
        "SURPLUS_BYTES",
        "wait",
        "deadlock.*phase 0 misses 0 of 1 arrivals, and 512 bytes more have landed than it expects\n",
        "",
    ),
    (
        "MISALIGNED_TILE",
        "load",
        "tma_load: the address in shared memory is not a multiple of 128 bytes",
        "",
    ),
    (
        "MISALIGNED_BULK",
        "bulk",
        "bulk_load: the global address and the number of bytes, 2048, must be multiples of 16",
        "",
    ),
    (
        "BYTES_24",
        "bulk",
        "bulk_load: the global address and the number of bytes, 24, must be multiples of 16",
        "",
    ),
    (
        "MISALIGNED_STORE",
        "store",
        "tma_store: the address in shared memory is not a multiple of 128 bytes",
        "",
    ),
    (
        "IN_FLIGHT_AT_END",
        "load",
        "a copy of 2048 bytes to shared memory was still in flight when the block ended; wait for its mbarrier",
        "lazy",
    ),
    (
        "BEYOND_THE_TENSOR",
        "bulk",
        "out of range: reads 2048 bytes of tensor 'x' at byte 1024; it has 2048",
        "check",
    ),
    (
        "THREADS_DIFFER",
        "barrier",
        r"barrier_sync: barrier 1 is for (128|64) threads here, and for (64|128) where others wait at it",
        "",
    ),
    (
        "THREADS_48",
        "barrier",
        "barrier_sync: the number of threads that come must be a multiple of 32, up to the block's 128; got 48",
        "",
    ),
    ("TOO_MANY_THREADS", "barrier", "must be a multiple of 32, up to the block's 128; got 160", ""),
    ("BARRIER_16", "barrier", "barrier_sync: a block has barriers 0 to 15; got 16", ""),
    (
        "NOT_ALL_COME",
        "barrier",
        "deadlock.*threads 0 to 95 at barrier_sync.*: barrier 1 has 96 of 128 threads\n",
        "",
    ),
]


def make_mistake(mistake: str) -> tuple[torch.Tensor, torch.Tensor]:
    x, out = torch.randn(512), nan(128)
    truth = swizzled(x.view(1, 16, 32)).flatten()[:128]
    _hopper.launch("run_mistakes", x=x, out=out, mistake=names("Mistake").index(mistake))
    return out, truth


def test_every_mistake_is_in_the_table():
    assert [mistake for mistake, *_ in MISTAKES] == names("Mistake")[1:]


@both_builds
@pytest.mark.parametrize("mistake, tag, says, when", MISTAKES, ids=[m[0] for m in MISTAKES])
def test_mistakes_are_named(mistake, tag, says, when, check):
    if when == "check" and not check:
        return
    for mode in LAZY if when == "lazy" else MODES:
        with using(check=check, **mode):
            with pytest.raises(KernelError) as caught:
                make_mistake(mistake)
            text = str(caught.value)
            assert re.search(says, text, re.DOTALL), text
            where = text if says.startswith("deadlock") else text.splitlines()[0]
            assert re.search(rf"{line_of(tag)}\b", where), text
            assert "in kernel mistakes, block (0,0,0)" in text
            assert torch.equal(*make_mistake("NONE"))  # and the next launch is as good as ever
