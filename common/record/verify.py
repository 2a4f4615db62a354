"""Is a record what a run has written? Sentences about what is not; nothing is raised, whatever it holds.

An edit is noticed by the record's own digest, which a determined student can compute anew, and by figures that do not
follow from each other. Neither proves anything: what counts is the grader's own run.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from common.paths import ROOT
from common.record.points import WORTH, Worth, earned
from common.record.provenance import hashes, sources_hash
from common.record.record import digest
from common.record.shape import misfits
from common.timing import IMPOSSIBLE, KEPT

# Whether a record must be of the checks and of common/ as they are now, and carry hashes. In the course itself common/
# changes daily, and its records from a GPU may be older than that.
# BEGIN STAFF, for students: STRICT = True
STRICT = False
# END STAFF

SHOWN = 5  # sentences about a stage; the rest is counted
_STATUSES = ("passed", "failed", "not written", "did not build", "not run")
_DIGITS = 1e-5  # samples are kept to six

Entry = Mapping[str, Any]


class Stale:
    """What has changed in a checkout since a run: ``sources``, ``checks``, ``common/`` or nothing. Hashes each once."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self._sources: dict[tuple[str, ...], str] = {}
        self._hashes: dict[str, dict[str, str]] = {}

    def __call__(self, stage: str, run: Mapping[str, Any]) -> str:
        patterns = tuple(run["sources"]["patterns"])
        if patterns not in self._sources:
            self._sources[patterns] = sources_hash(patterns, self._root)
        if self._sources[patterns] != run["sources"]["sha256"]:
            return "sources"
        return self.given(stage, run) if STRICT else ""

    def given(self, stage: str, run: Mapping[str, Any]) -> str:
        """What of the given files has changed; nothing is known of a run without hashes."""
        if stage not in self._hashes:
            self._hashes[stage] = hashes(stage, (), self._root)
        made, now = run.get("hashes"), self._hashes[stage]
        if made is None:
            return ""
        changed = (
            words
            for name, words in (("tests", "checks"), ("common", "common/"))
            if made[name] != now[name]
        )
        return next(changed, "")


def refused(records: Mapping[str, Any], root: Path = ROOT) -> list[str]:
    """Why these records cannot be used, a sentence for each stage: it names file, stage and what to do.

    Args:
        records: by device what ``common/records/DEVICE.json`` holds.
        root: the checkout that they are in.
    """
    stale = Stale(root)
    sentences = []
    for device, content in records.items():
        file = f"common/records/{device}.json"
        for stage, found in checked(content, device, stale).items():
            where = f"{file}, {stage}" if stage else file
            sentences.append(
                f"{where}: {found[0]}; restore it (git checkout {file}), or delete it, and its stages are graded anew"
            )
    return sentences


def checked(content: Any, device: str, stale: Stale) -> dict[str, list[str]]:
    """By stage what is wrong with a file of records, where something is; what is wrong with all of it is under "".

    Args:
        content: what ``json.loads`` made of it.
        device: that the file is named after.
        stale: what the course is now.
    """
    if not (isinstance(content, dict) and isinstance(content.get("stages"), dict)):
        return {"": ['it must have {"device": ..., "stages": {...}}']}
    found = {"": _wrong_names(content, device)}
    for stage, entry in content["stages"].items():
        if stage in WORTH:
            found[stage] = problems(entry, stage, device, stale)
    return {stage: sentences for stage, sentences in found.items() if sentences}


def _wrong_names(content: Mapping[str, Any], device: str) -> list[str]:
    wrong = [
        f"{ascii(stage)[:100]} is no stage" for stage in content["stages"] if stage not in WORTH
    ]
    if content.get("device") != device:
        wrong.insert(0, f"its device is {ascii(content.get('device'))[:100]}")
    return wrong[:SHOWN]


def problems(entry: Any, stage: str, device: str, stale: Stale) -> list[str]:
    """What is wrong with a stage's record: what it lacks, an edit, figures that do not follow from each other.

    Args:
        entry: what :func:`common.record.merge` made of its runs, as JSON.
        stage, device: that it is kept as.
        stale: what the course is now. Points are compared with points.toml as it was when the record was made.

    Returns:
        Sentences that can be printed, at most ``SHOWN`` and one that counts the others.
    """
    wrong = islice(misfits(entry), SHOWN)
    if found := list(wrong):
        return [_printable(sentence) for sentence in found]
    changed = stale.given(stage, entry["run"]) == "common/"
    found = [
        *_edited(entry, stage, device),
        *_counts(entry["groups"]),
        *_points(entry, None if changed else WORTH[stage]),
        *_verdict(entry),
        *(s for name, b in entry["benchmarks"].items() for s in _benchmark(name, b, entry)),
    ]
    more = [f"and {len(found) - SHOWN} more"] if found[SHOWN:] else []
    return [_printable(sentence) for sentence in found[:SHOWN]] + more


def _printable(text: str) -> str:
    text = text if len(text) <= 300 else f"{text[:300]}..."
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _edited(entry: Entry, stage: str, device: str) -> Iterator[str]:
    if "digest" in entry:
        if entry["digest"] != digest(entry):
            yield "it was edited after it was written"
    elif STRICT or "hashes" in entry["run"]:
        yield "it has no digest, as every record that was not edited has"
    for name, kept_as in (("stage", stage), ("device", device)):
        if entry[name] != kept_as:
            yield f"it is a record of {entry[name]}, kept as one of {kept_as}"


def _counts(groups: Sequence[Entry]) -> Iterator[str]:
    if len({group["name"] for group in groups}) != len(groups):
        yield "two groups of checks have the same name"
    for group in groups:
        name, status = group["name"], group["status"]
        said = f"{group['passed']} of {group['total']}"
        if group["passed"] > group["total"]:
            yield f"{name}: {said} checks passed"
        elif status not in _STATUSES:
            yield f"{name}: {status!r} is no status"
        elif (status == "passed") != (group["passed"] == group["total"]):
            yield f"{name}: {said} checks passed, and it is called {status}"


def _points(entry: Entry, worth: Worth | None) -> Iterator[str]:
    if entry["earned"] > entry["points"]:
        yield f"{entry['earned']:g} of {entry['points']:g} points"
    if worth is None:
        return
    if entry["points"] != worth.points:
        yield f"it is worth {worth.points:g} points, and not {entry['points']:g}"
    if entry["earned"] != (right := earned(worth, entry["groups"])):
        yield f"its groups of checks earn {right:g} points, and not {entry['earned']:g}"


def _verdict(entry: Entry) -> Iterator[str]:
    found = {group["status"] for group in entry["groups"]} - {"passed"}
    kinds = found - {"not run"}
    failed = kinds.pop() if len(kinds) == 1 else "failed"
    fits = [failed] if found else ["passed", *(["failed"] if entry["problems"] else [])]
    if entry["status"] not in (*fits, "crashed"):
        yield f"it is called {entry['status']}; its groups of checks say {fits[0]}"
    if not entry["complete"] and entry["status"] != "crashed":
        yield "it is from a run of some checks alone"


# Times ------------------------------------------------------------------------------------------------


def _benchmark(name: str, found: Entry, entry: Entry) -> Iterator[str]:
    new = (
        "hashes" in found["run"]
    )  # runs of before had no samples, and did not say what they counted
    for side, timing in {"ours": found["ours"], **found["baselines"]}.items():
        yield from (f"{name}, {side}: {wrong}" for wrong in _timing(timing, new))
    ours = found["ours"]["median_ms"]
    if not ours:
        return
    if found["speedups"].keys() != found["baselines"].keys():
        yield f"{name}: its speedups are not those of its baselines"
        return
    for baseline, timing in found["baselines"].items():
        if not _alike(found["speedups"][baseline], ratio := timing["median_ms"] / ours):
            yield f"{name}: {found['speedups'][baseline]:.4g}x {baseline}, but the times give {ratio:.4g}x"
    chip = entry.get("reference") if found["run"] == entry["run"] else None
    for key, counted, unit, scale in _RATES:
        if key not in found:
            continue
        rate = found[key]["rate"]
        if (work := found.get(counted)) is not None:
            if not _alike(rate, right := work / ours / scale):
                yield f"{name}: {rate:.4g} {unit}, but {counted} and time give {right:.4g}"
        elif new:
            yield f"{name}: {unit} without {counted}"
        yield from _possible(name, found[key], unit, _limit(key, found["dtype"], chip))


_RATES = (("tflops", "flops", "TFLOP/s", 1e9), ("gb_per_s", "bytes", "GB/s", 1e6))


def _timing(timing: Entry, new: bool) -> Iterator[str]:
    p10, median, p90 = (timing[key] for key in ("p10_ms", "median_ms", "p90_ms"))
    if not (0 < p10 <= median <= p90 and timing["n"]):
        yield f"{median:g} ms ({p10:g}-{p90:g}, n {timing['n']}) is no time"
    elif "samples_ms" in timing:
        samples = timing["samples_ms"]
        if len(samples) != min(timing["n"], KEPT) or samples != sorted(samples):
            yield f"of {timing['n']} runs {min(timing['n'], KEPT)} samples are kept, in order; it has {len(samples)}"
        elif not all(
            _alike(_quantile(samples, part), value)
            for part, value in ((0.1, p10), (0.5, median), (0.9, p90))
        ):
            yield f"{median:g} ms ({p10:g}-{p90:g}) does not follow from its samples"
    elif new:
        yield "it has no samples"


def _quantile(ordered: Sequence[float], part: float) -> float:
    at = part * (len(ordered) - 1)
    below = math.floor(at + 1e-9)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (at - below) * (ordered[above] - ordered[below])


def _alike(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=_DIGITS)


def _limit(key: str, dtype: str, chip: Mapping[str, float] | None) -> float | None:
    """What the GPU reaches, as :meth:`common.timing.Reference.fastest_matmul` has it."""
    if chip is None:
        return None
    if key == "gb_per_s":
        return chip["read_gb_per_s"]
    products = [chip["bf16_tflops"]]
    return max([*products, chip["fp32_tflops"]] if dtype in ("float32", "float64") else products)


def _possible(name: str, rate: Entry, unit: str, limit: float | None) -> Iterator[str]:
    if limit is not None and rate["rate"] > IMPOSSIBLE * limit:
        yield f"{name}: {rate['rate']:.4g} {unit}, and this GPU reaches {limit:.4g}"
    if "share" in rate and unit == "GB/s" and rate["share"] > IMPOSSIBLE:
        yield f"{name}: {rate['share']:.0%} of what this GPU reaches"
