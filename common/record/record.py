"""What one run of a suite found, as JSON on disk."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.marked import write_atomically
from common.paths import ROOT
from common.record.points import Worth, earned
from common.record.provenance import hashes, provenance
from common.timing import Benchmark, benchmark_lines, reference


@dataclass(frozen=True)
class Stage:
    """What a record is about.

    Args:
        name: the stage's folder, "task2".
        title: what it is, for people.
        worth: what it is worth.
        sources: files that decide its result, glob patterns from the repository's root. A figure in Results.md is
            stale once one of these, or a header in common/include, has changed since it was measured.
    """

    name: str
    title: str
    worth: Worth
    sources: tuple[str, ...] = ()


class Record:
    """What one run of a suite found; a benchmark function adds to it.

    Args:
        stage: whose suite it is.
        device: "cpu" or "cuda".
        seed: of the random inputs.
        complete: whether all groups were requested.
        answers: the files that a student writes in.
        fields: the names of the benchmarks that the suite promises.
        root: the checkout.

    Attributes:
        groups: of each group of checks ``name``, ``passed``, ``total``, ``seconds``, ``status`` and ``failures``.
        problems: what went wrong in the benchmarks, in a sentence each.
        allowed: the fields that the running benchmark function may add; empty: any.
        wrong: a benchmark failed, or gave an impossible result.
    """

    def __init__(
        self,
        stage: Stage,
        *,
        device: str,
        seed: int,
        complete: bool,
        answers: Sequence[str] = (),
        fields: Sequence[str] = (),
        root: Path = ROOT,
    ) -> None:
        self.stage, self.device, self.seed, self.complete = stage, device, seed, complete
        self.fields = list(fields)
        self.groups: list[dict[str, Any]] = []
        self.benchmarks: dict[str, dict[str, Any]] = {}
        self.texts: dict[str, str] = {}
        self.problems: list[str] = []
        self.allowed: Sequence[str] = ()
        self.wrong = False
        self._finished = False
        self._reference: dict[str, float] | None = None
        self._run = provenance(stage.sources, device=device, seed=seed, root=root)
        self._run["hashes"] = hashes(stage.name, answers, root)

    @property
    def ok(self) -> bool:
        return all(group["status"] == "passed" for group in self.groups) and not self.wrong

    def measure_reference(self) -> None:
        """Measure, print and record what PyTorch reaches on this GPU."""
        chip = reference()
        self._reference = chip.as_record()
        print(
            f"  PyTorch on this GPU: read {chip.read_gb_per_s:.0f} GB/s, matrix products"
            f" {chip.fp32_tflops:.1f} TFLOP/s in float32, {chip.bf16_tflops:.0f} in bfloat16",
            flush=True,
        )

    def add(self, benchmark: Benchmark) -> None:
        """Record and print a benchmark.

        Raises:
            ValueError: the benchmark function did not promise this name in its ``fields``.
            ImpossibleRate: the rate is impossible.
        """
        if self.allowed and benchmark.name not in self.allowed:
            raise ValueError(f"{benchmark.name!r} is not among the fields {tuple(self.allowed)}")
        rated = self.device == "cuda" and (benchmark.flops or benchmark.bytes)
        found = benchmark.as_record(reference() if rated else None)
        self.benchmarks[benchmark.name] = found
        for line in benchmark_lines(benchmark.name, found):
            print(f"    {line}", flush=True)

    def text(self, name: str, text: str) -> None:
        """Record and print a text, such as what a model wrote."""
        self.texts[name] = text
        print(f"    {name}: {text}", flush=True)

    def finish(self) -> None:
        """All has run."""
        self._finished = True

    def as_json(self) -> dict[str, Any]:
        return {
            "stage": self.stage.name,
            "title": self.stage.title,
            "device": self.device,
            "status": self._status(),
            "complete": self.complete,
            "groups": self.groups,
            "points": self.stage.worth.points,
            "earned": earned(self.stage.worth, self.groups),
            "fields": self.fields,
            "benchmarks": self.benchmarks,
            "texts": self.texts,
            "problems": self.problems,
            "reference": self._reference,
            "run": self._run,
        }

    def write(self, path: Path) -> None:
        """As JSON; appears whole or not at all."""
        write_json(path, self.as_json())

    def _status(self) -> str:
        if not self._finished:
            return "crashed"
        if self.ok:
            return "passed"
        found = {group["status"] for group in self.groups} - {"passed", "not run"}
        return found.pop() if len(found) == 1 else "failed"


def merge(old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> dict[str, Any]:
    """A stage's record after another run: what that run measured replaces what was there, the rest is kept.

    Every figure carries the run that it comes from: machine, date, commit and sources.
    """
    run = new["run"]
    old = old or {}
    # A stage that could not even be imported says nothing about what it measures.
    fields = new["fields"] or old.get("fields", [])
    benchmarks = {
        name: benchmark
        for name, benchmark in old.get("benchmarks", {}).items()
        if name in fields  # what the stage no longer measures goes
    }
    texts = dict(old.get("texts", {}))
    benchmarks |= {name: dict(found, run=run) for name, found in new["benchmarks"].items()}
    texts |= {name: {"text": text, "run": run} for name, text in new["texts"].items()}
    merged = {**new, "fields": fields, "benchmarks": benchmarks, "texts": texts}
    return merged | {"digest": digest(merged)}


def digest(entry: Mapping[str, Any]) -> str:
    """sha256 of a stage's record, all but its own ``digest``: by it an edit is noticed.

    It is no signature. Whoever edits a record can compute it anew; only a run by someone else proves what it says.
    """
    kept = {name: value for name, value in entry.items() if name != "digest"}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def write_json(path: Path, content: Any) -> None:
    """JSON with a final newline, by atomic rename; a list of numbers stands on one line."""
    text = json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False)
    text = re.sub(r"\[\n([-+.\deE,\s]+)\]", lambda found: f"[{' '.join(found[1].split())}]", text)
    write_atomically(path, text + "\n")
