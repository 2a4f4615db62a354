"""The leaderboard: opt-in, under a name that the student chooses in ``leaderboard.txt``, by measured speed."""

import math
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

FILE = "leaderboard.txt"
LENGTH = 30  # characters of a name
MARKS = 2  # accents on a character; more of them cover the lines above and below


class Row(NamedTuple):
    """A line of a stage's ranking.

    Attributes:
        place: from 1; equal speeds share one.
        name: as it is shown, unique.
        ratio: the time of the course's kernel divided by this one's, geometric mean over the stage's benchmarks.
        milliseconds: of each benchmark, by its name.
    """

    place: int
    name: str
    ratio: float
    milliseconds: dict[str, float]


def chosen_name(data: bytes) -> str:
    """The name to be shown: the first line that is no comment, made harmless; empty: not taking part.

    It has at most ``LENGTH`` characters, none of them invisible, or with a meaning in Markdown's code spans and tables
    or at the start of a spreadsheet's cell.
    """
    text = unicodedata.normalize("NFC", data.decode("utf-8-sig", errors="ignore"))
    lines = (line.strip() for line in text.splitlines())
    line = next((line for line in lines if line and not line.startswith("#")), "")
    kept = ""
    for c in line:
        kind = unicodedata.category(c)
        crowded = all(unicodedata.category(m)[0] == "M" for m in kept[-MARKS:])  # or it is empty
        if kind == "Zs":
            kept += " "
        elif (kind[0] in "LNPS" and c not in "`|<>\\") or (kind[0] == "M" and not crowded):
            kept += c
    return " ".join(kept.split()).lstrip("=+-@' ")[:LENGTH].strip()


def ranking(results: Sequence[Mapping[str, Any]], stage: str) -> list[Row]:
    """Those who take part and whose checks all passed in this stage, the fastest first.

    Who lacks the time of a benchmark that another one has is not in it.
    """
    found = {id(r): _speed(r, stage) for r in results}
    benchmarks = {name for speed in found.values() for name in speed}
    rows = []
    for result in results:
        speed = found[id(result)]
        if result.get("leaderboard") and speed and set(speed) == benchmarks:
            ratio = math.exp(sum(math.log(s["ratio"]) for s in speed.values()) / len(speed))
            times = {name: s["ours_ms"] for name, s in sorted(speed.items())}
            rows.append((-ratio, result["leaderboard"], result["name"], times))
    rows.sort(key=lambda row: row[:3])
    used: set[str] = set()
    places: list[Row] = []
    for minus, name, _, times in rows:
        same = bool(places) and places[-1].ratio == -minus
        place = places[-1].place if same else len(places) + 1
        shown, count = name, 1
        while _alike(shown) in used:
            count += 1
            shown = f"{name} ({count})"
        used.add(_alike(shown))
        places.append(Row(place, shown, -minus, times))
    return places


def _alike(name: str) -> str:
    return unicodedata.normalize("NFKC", name).casefold()


def _speed(result: Mapping[str, Any], stage: str) -> dict[str, Any]:
    found = result["stages"].get(stage, {})
    if found.get("status") != "passed":
        return {}
    return {n: s for n, s in found.get("speed", {}).items() if 0 < s["ratio"] < math.inf}
