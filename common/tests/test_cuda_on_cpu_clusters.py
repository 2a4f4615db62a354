"""Clusters and cooperative launches on the CPU layer: other blocks' memory, blocks that wait, and mistakes."""

import math
import re
import time

import pytest
import torch

from common.build import KernelError, Kernels, using
from common.tests.kernel_file import KernelFile

FILE = KernelFile("clusters.cu")
names, line_of = FILE.names, FILE.line_of
_clusters = Kernels(__file__, "kernels/clusters.cu")
ORDERS = ("forward", "reverse", "random")

both_builds = pytest.mark.parametrize("check", [False, True], ids=["fast", "check"])


def nan(*shape: int) -> torch.Tensor:
    return torch.full(shape, math.nan)


# ---- clusters


def exchange(size: int, clusters: int, way: int, wide: int) -> bool:
    rounds, y = 3, 2
    blocks = size * clusters * y
    out = nan(rounds, blocks, size, 2)
    _clusters.launch(
        "run_exchange",
        out=out,
        size=size,
        clusters=clusters,
        y=y,
        rounds=rounds,
        way=way,
        wide=wide,
    )
    block = torch.arange(blocks)
    sender = (block // size * size).view(1, -1, 1) + torch.arange(size)
    truth = torch.stack(
        [
            (100 * torch.arange(rounds).view(-1, 1, 1) + sender).expand(rounds, blocks, size),
            (block % size).view(1, -1, 1).expand(rounds, blocks, size),
        ],
        dim=-1,
    )
    return torch.equal(out, truth.float())


@both_builds
@pytest.mark.parametrize("way", names("Way"))
@pytest.mark.parametrize("size", [1, 2, 4, 16])
def test_blocks_of_a_cluster_exchange_what_they_have(size, way, check):
    number = names("Way").index(way)
    for order in ORDERS:
        for seed in (0, 5):
            with using(check=check, order=order, seed=seed, limit=60):
                assert exchange(size, 1, number, wide=1) and exchange(size, 3, number, wide=0)
    with using(check=check, threads=1, limit=60):
        assert exchange(size, 3, number, wide=1)


@both_builds
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", [2, 4, 16])
def test_threads_that_have_returned_are_not_waited_for(size, order, check):
    out = nan(3, size)
    with using(check=check, order=order, limit=60):
        _clusters.launch("run_early_return", out=out, size=size, clusters=3, rounds=4)
    assert torch.equal(out, torch.tensor([3.0] * (size - 1) + [0.0]).expand(3, size))


@both_builds
@pytest.mark.parametrize("order", ORDERS)
def test_without_clusters_all_threads_of_a_block_wait(order, check):
    """As on a GPU, where the wait is a barrier of the block then."""
    out = nan(4 * 64)
    with using(check=check, order=order, limit=60):
        _clusters.launch("run_half_waits", out=out, size=2)
        assert (out == 1).all()
        where = rf"threads 0 to 31 at wait_for_cluster, {line_of('half waits')}"
        with pytest.raises(KernelError, match=f"(?s)deadlock.*{where}"):
            _clusters.launch("run_half_waits", out=out, size=1)


def cluster_mistake(mistake: str) -> torch.Tensor:
    out, go = nan(512), torch.zeros(1, dtype=torch.int32)
    _clusters.launch("run_mistakes", out=out, go=go, mistake=names("Mistake").index(mistake))
    return out


CLUSTER_MISTAKES = [
    (
        "TO_AN_ENDED_BLOCK",
        "to ended",
        "a store to block 3 of the cluster, which has not begun, or has ended",
    ),
    ("RANK_4", "to rank 4", "a store to block 4 of a cluster of 4"),
    ("RANK_BELOW_0", "to rank -1", "a store to block -1 of a cluster of 4"),
    ("NOT_SHARED", "to global", "a store to another block: the variable is not in shared memory"),
    (
        "MISALIGNED",
        "to misaligned",
        "a store to another block: the address is not a multiple of 16 bytes",
    ),
    (
        "OUT_OF_RANGE",
        "to nothing",
        "out of range: a store of 16 bytes to another block, outside of all shared",
    ),
    (
        "SEND_WITHOUT_INIT",
        "send",
        "a store to block 2 of the cluster: the mbarrier is not initialised",
    ),
    ("LOAD_OF_RANK_4", "from rank 4", "a load from block 4 of a cluster of 4"),
    (
        "LOAD_OUT_OF_RANGE",
        "from nowhere",
        "out of range: a load of 16 bytes from another block, outside of all shared",
    ),
    ("FAILS", "fails", "mbarrier_arrive: the mbarrier is not initialised"),
    (
        "FAULTS",
        "faults",
        "illegal memory access at address 0x8|out of range: writes 4 bytes at address 0x8",
    ),
]


def test_every_mistake_of_a_cluster_is_in_the_table():
    listed = [mistake for mistake, *_ in CLUSTER_MISTAKES]
    assert [*listed, "WAITS_FOR_EVER", "SPINS", "LOAD_OF_NOTHING"] == names("Mistake")[1:]


@both_builds
@pytest.mark.parametrize(
    "mistake, tag, says", CLUSTER_MISTAKES, ids=[m[0] for m in CLUSTER_MISTAKES]
)
def test_one_block_fails_while_its_cluster_waits(mistake, tag, says, check):
    for order in ORDERS:
        with using(check=check, order=order, limit=60):
            with pytest.raises(KernelError, match=says) as caught:
                cluster_mistake(mistake)
            text = str(caught.value)
            assert text.startswith(f"{line_of(tag)}: "), text
            assert re.search(r"block \([15],0,0\), thread \(0,0,0\)", text), text
            assert (cluster_mistake("NONE") == 1).all()


def test_a_load_of_what_nobody_has_written():
    with using(check=True, limit=60), pytest.raises(KernelError, match="uninitialised") as caught:
        cluster_mistake("LOAD_OF_NOTHING")
    assert str(caught.value).startswith(f"{line_of('of nothing')}: ")


@both_builds
@pytest.mark.parametrize("mistake, tag", [("WAITS_FOR_EVER", "for ever"), ("SPINS", "spins")])
def test_a_cluster_that_does_not_end(mistake, tag, check):
    assert (cluster_mistake("NONE") == 1).all()
    began = time.monotonic()
    with (
        using(check=check, limit=0.3),
        pytest.raises(KernelError, match="did not end within 0.3 s") as caught,
    ):
        cluster_mistake(mistake)
    assert time.monotonic() - began < 10
    places = [line_of(tag), line_of("all wait")]
    assert any(re.search(rf"is at {place}\b", str(caught.value)) for place in places)


def test_a_cluster_in_which_all_wait():
    with (
        using(limit=60),
        pytest.raises(KernelError, match="deadlock: no thread of the block can go on") as caught,
    ):
        cluster_mistake("WAITS_FOR_EVER")
    assert line_of("all wait") in str(caught.value)


@both_builds
@pytest.mark.parametrize(
    "blocks, cluster, says",
    [
        (8, 3, "the x dimension of the grid must be a multiple of the cluster's 3 blocks"),
        (34, 17, "a cluster has from 1 to 16 blocks, neighbours in x"),
        (
            133,
            0,
            "a cooperative launch of 133 blocks; here at most 132 run at once, one on a multiprocessor",
        ),
    ],
)
def test_impossible_launches_of_blocks_that_run_together(blocks, cluster, says, check):
    with using(check=check), pytest.raises(KernelError, match=says) as caught:
        _clusters.launch("run_number_blocks", out=nan(blocks), blocks=blocks, cluster=cluster)
    assert str(caught.value).startswith(f"{line_of('launch')}: invalid launch configuration: ")


# ---- cooperative launches


def sums_of_all(blocks: int, absent: int = -1) -> bool:
    partial, out, counter = nan(3, blocks), nan(3, blocks), torch.zeros(1, dtype=torch.int32)
    _clusters.launch(
        "run_sums_of_all",
        partial=partial,
        out=out,
        counter=counter,
        blocks=blocks,
        rounds=3,
        absent=absent,
    )
    truth = (torch.arange(3.0).view(-1, 1) + 1) * (blocks * (blocks - 1) // 2)
    return torch.equal(out, truth.expand(3, blocks))


@both_builds
@pytest.mark.parametrize("blocks", [1, 3, 12, 132])
def test_all_blocks_of_a_grid_meet(blocks, check):
    for order in ORDERS:
        with using(check=check, order=order, seed=5, limit=60):
            assert sums_of_all(blocks)


@both_builds
def test_a_grid_of_which_one_block_does_not_come(check):
    sums_of_all(1)
    with (
        using(check=check, limit=0.3),
        pytest.raises(KernelError, match="did not end within 0.3 s"),
    ):
        sums_of_all(3, absent=1)
