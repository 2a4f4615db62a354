"""Bank conflicts of shared memory, counted by the check build."""

from pathlib import Path

import pytest
import torch

from common.build import Kernels, using
from common.build.library import counts

SOURCE = Path(__file__).parent / "kernels/banks.cu"
_kernels = Kernels(__file__, "kernels/banks.cu")


def counted(launcher: str, **arguments: int) -> list[list[str]]:
    with using(check=True, count=True):
        _kernels.launch(launcher, out=torch.zeros(256), **arguments)
        return [line.split("|") for line in counts()]


def at(rows: list[list[str]], mark: str) -> list[list[int]]:
    """Bytes, instructions, passes and fewest passes of what the marked line reads or writes."""
    lines = SOURCE.read_text().splitlines()
    number = next(i for i, line in enumerate(lines, 1) if line.endswith(f"// @{mark}"))
    place = f"common/tests/kernels/banks.cu:{number}"
    return [[int(n) for n in row[3:]] for row in rows if row[:2] == ["shared", place]]


@pytest.mark.parametrize(
    ("floats", "stride", "passes"),
    [
        (1, 1, 1),
        (1, 0, 1),  # one word for all: a broadcast
        (1, 2, 2),
        (1, 32, 32),
        (1, 33, 1),  # a column of 32 x 32, padded by one
        (1, 17, 1),
        (2, 1, 2),
        (2, 16, 32),
        (4, 1, 4),
        (4, 8, 32),  # a column of float4, rows of 32 floats
        (4, 9, 4),  # the same, rows padded by 4 floats
    ],
)
def test_known_patterns(floats, stride, passes):
    rows = counted("run_strided", floats=floats, stride=stride)
    least = {1: 1, 2: 2, 4: 4}[floats]
    assert at(rows, "read") == [[4 * floats, 2, 2 * passes, 2 * least]]  # of two warps
    assert at(rows, "write") == [[4 * floats, 2, 2 * least, 2 * least]]


def test_levels_of_a_tree_are_told_apart():
    rows = counted("run_tree")
    # 6 levels, of which only the first warp has threads; each reads two elements and writes one
    assert at(rows, "tree") == [[4, 6, 6, 6]] * 3
    blocks = sorted(row[1:] for row in rows if row[0] == "block")
    assert blocks == [[at, "7"] for at in ("0 0 0", "0 1 0", "1 0 0", "1 1 0")]
    assert [row[1:] for row in rows if row[0] == "kernel"] == [["tree", "64", "256", "0"]]


def test_nothing_is_counted_unless_asked():
    counted("run_tree")
    with using(check=True):
        _kernels.launch("run_tree", out=torch.zeros(256))
        assert counts() == []
    with using(count=True):  # the fast build sees no accesses
        _kernels.launch("run_tree", out=torch.zeros(256))
        assert counts() == []
