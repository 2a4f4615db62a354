"""Times on a GPU, compared with PyTorch's and with what the GPU can reach.

Timing      the times of one operation: median, spread, number of runs
Benchmark   our time and those of the baselines, with the rates that follow
Reference   what PyTorch itself reaches on this GPU: a matrix product, a pure read
"""

from common.timing.benchmark import (
    IMPOSSIBLE,
    Benchmark,
    ImpossibleRate,
    benchmark_lines,
    show_rates,
    show_timing,
)
from common.timing.measure import KEPT, Timing, all_alike, measure, microseconds
from common.timing.reference import (
    Reference,
    float32_products,
    matmul_tflops,
    reference,
    split_matmul_tflops,
)
from common.timing.sdpa import Backend, sdpa

__all__ = [
    "Backend",
    "Benchmark",
    "IMPOSSIBLE",
    "ImpossibleRate",
    "KEPT",
    "Reference",
    "Timing",
    "all_alike",
    "benchmark_lines",
    "float32_products",
    "matmul_tflops",
    "measure",
    "microseconds",
    "reference",
    "sdpa",
    "show_rates",
    "show_timing",
    "split_matmul_tflops",
]
