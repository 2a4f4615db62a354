"""One timed operation and its baselines."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from common.dtypes import dtype_name
from common.timing.measure import Timing
from common.timing.reference import PURE_READ, Reference

IMPOSSIBLE = 1.15  # of a measured rate, which itself varies by a few per cent


class ImpossibleRate(AssertionError):
    """More work per second than this GPU can do: the times or the counted work are wrong."""


@dataclass
class Benchmark:
    """One timed operation and its baselines.

    Args:
        name: one of the fields that its benchmark function promised.
        shape: as people read it: "B4 S128 hidden 4096, 32 heads, causal".
        dtype: of the inputs; decides the matrix product that TFLOP/s are compared with.
        ours: our time.
        baselines: times by name; the name says which backend it is.
        flops: floating-point operations of one run, counted for the algorithm (causal: half).
        bytes: bytes that one run has to read and write at least.
        split: float32 is multiplied on tensor cores, in 16-bit parts, and compared with such a matrix product.
        note: what else must be known, such as a size that was scaled down.
    """

    name: str
    shape: str
    dtype: torch.dtype
    ours: Timing
    baselines: Mapping[str, Timing]
    flops: float | None = None
    bytes: float | None = None
    split: bool = False
    note: str = ""

    @property
    def tflops(self) -> float | None:
        return self.flops / self.ours.median_ms / 1e9 if self.flops else None

    @property
    def gb_per_s(self) -> float | None:
        return self.bytes / self.ours.median_ms / 1e6 if self.bytes else None

    def speedup(self, baseline: str) -> float:
        """How many times as fast as that baseline; below 1 is slower."""
        return self.baselines[baseline].median_ms / self.ours.median_ms

    def as_record(self, chip: Reference | None) -> dict[str, Any]:
        """As JSON, with the shares of what PyTorch reaches on this GPU.

        Raises:
            ImpossibleRate: it would be faster than the GPU.
        """
        record: dict[str, Any] = {
            "shape": self.shape,
            "dtype": dtype_name(self.dtype),
            "ours": self.ours.as_record(),
            "baselines": {name: timing.as_record() for name, timing in self.baselines.items()},
            "speedups": {name: self.speedup(name) for name in self.baselines},
            "note": self.note,
            "flops": self.flops,
            "bytes": self.bytes,
        }
        if (rate := self.tflops) is not None:
            record["tflops"] = {"rate": rate}
            if chip:
                self._expect_possible(rate, chip.fastest_matmul(self.dtype), "TFLOP/s")
                reference, name = chip.matmul(self.dtype, split=self.split)
                record["tflops"] |= {"share": rate / reference, "of": name}
        if (rate := self.gb_per_s) is not None:
            record["gb_per_s"] = {"rate": rate}
            if chip:
                self._expect_possible(rate, chip.read_gb_per_s, "GB/s")
                record["gb_per_s"] |= {"share": rate / chip.read_gb_per_s, "of": PURE_READ}
        return record

    def _expect_possible(self, rate: float, limit: float, unit: str) -> None:
        if rate > IMPOSSIBLE * limit:
            raise ImpossibleRate(
                f"{self.name}: {rate:.0f} {unit} is impossible: this GPU reaches {limit:.0f};"
                " the work was not done within the measured time, or it is counted wrong"
            )


def benchmark_lines(name: str, record: Mapping[str, Any]) -> list[str]:
    """A benchmark's record in words, one line for ours and one for each baseline."""
    ours = f"{name} ({record['shape']}, {record['dtype']}): {show_timing(record['ours'])}"
    lines = [", ".join([ours, *show_rates(record)])]
    for baseline, timing in record["baselines"].items():
        lines.append(f"  {record['speedups'][baseline]:.2f}x {baseline}: {show_timing(timing)}")
    if record["note"]:
        lines.append(f"  {record['note']}")
    return lines


def show_rates(record: Mapping[str, Any]) -> list[str]:
    """``36.1 TFLOP/s (70% of a float32 matrix product)``; what the record has of them."""
    shown = []
    for key, unit, digits in (("tflops", "TFLOP/s", 3), ("gb_per_s", "GB/s", 4)):
        if found := record.get(key):
            text = f"{found['rate']:.{digits}g} {unit}"
            shown.append(
                f"{text} ({found['share']:.0%} of {found['of']})"
                if {"share", "of"} <= found.keys()
                else text
            )
    return shown


def show_timing(timing: Mapping[str, Any]) -> str:
    """``1.44 ms (1.42-1.51, n 200)``."""
    return f"{timing['median_ms']:.4g} ms ({timing['p10_ms']:.4g}-{timing['p90_ms']:.4g}, n {timing['n']})"
