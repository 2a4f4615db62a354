"""How a stage is checked.

suite = Suite("task2", title="...", sources=("task2/attention.py", ...))

CASES = [Case("ragged tail", why="65 rows: one past a tile of 64", small=True, rows=65, n=33), ...]

@suite.check("softmax", CASES)
def softmax_matches_float64(case, device, rng):
    x = rng.randn(case.rows, case.n)
    assert_close(ours(x), truth(x.double()), pytorch(x), axes=("row", "column"))

@suite.benchmark("softmax alone", fields=["softmax"])   # on a GPU, after the checks have passed
def softmax_speed(device, record):
    record.add(Benchmark("softmax", ...))                # common.timing

test_task2 = suite.pytest()
if __name__ == "__main__":
    suite.main()
"""

from common.check.attention_case import AttentionCase
from common.check.case import Case
from common.check.compare import FACTOR, CheckFailed, assert_close
from common.check.guards import strided_output
from common.check.poison import poisoned
from common.check.rng import Rng
from common.check.suite import Suite
from common.check.watch import Watch, written_out

__all__ = [
    "FACTOR",
    "AttentionCase",
    "Case",
    "CheckFailed",
    "Rng",
    "Suite",
    "Watch",
    "assert_close",
    "poisoned",
    "strided_output",
    "written_out",
]
