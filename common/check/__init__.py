"""How a stage is checked and timed.

suite = Suite("task2", title="...", points=3, sources=("task2/attention.py", ...))

CASES = [Case("ragged tail", why="65 rows: one past a tile of 64", small=True, rows=65, n=33), ...]

@suite.check("softmax", CASES)
def softmax_matches_float64(case, device, rng):
    x = rng.randn(case.rows, case.n)
    assert_close(ours(x), truth(x.double()), pytorch(x), axes=("row", "column"))

test_task2 = suite.pytest()
if __name__ == "__main__":
    suite.main()
"""

from common.check.compare import FACTOR, CheckFailed, assert_close
from common.check.poison import poisoned
from common.check.record import Report, Speed
from common.check.rng import Rng
from common.check.suite import Case, Suite
from common.check.timing import Ceilings, Timing, ceilings, measure
from common.memory import NotEnoughMemory, fit_batch, require_memory

__all__ = [
    "Case",
    "Ceilings",
    "CheckFailed",
    "FACTOR",
    "NotEnoughMemory",
    "Report",
    "Rng",
    "Speed",
    "Suite",
    "Timing",
    "assert_close",
    "ceilings",
    "fit_batch",
    "measure",
    "poisoned",
    "require_memory",
]
