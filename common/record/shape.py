"""What a record looks like, and where one does not: a record is read as a text that anybody may have written.

A shape is a description in words of a value (a key of ``_FITS``), a list of such, a mapping from any name, or a dict by
key; a key that ends with ``?`` may be missing, and ``Or none`` is for a value that may be null.
"""

import re
import reprlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

TEXT, FLAG = "a text", "true or false"
NUMBER, COUNT = "a number from 0 to 1e18", "a whole number from 0 to 1e9"
HASH, PATTERNS = "a sha256", "a list of at most 20 paths in tasks or in common/"

_LARGEST_TEXT = 100_000  # characters


class OrNone(NamedTuple):
    """A value of this shape, or null."""

    shape: Any


class Each(NamedTuple):
    """A dict from any name to values of this shape."""

    shape: Any


_TIMING = {
    "median_ms": NUMBER,
    "p10_ms": NUMBER,
    "p90_ms": NUMBER,
    "n": COUNT,
    "samples_ms?": [NUMBER],
}
_RATE = {"rate": NUMBER, "share?": NUMBER, "of?": TEXT}
_MACHINE = {
    "cpu": TEXT,
    "cores": OrNone(COUNT),
    "system": TEXT,
    "python": TEXT,
    "torch": TEXT,
    "transformers?": OrNone(TEXT),
    "gpu?": TEXT,
    "driver?": OrNone(TEXT),
    "cuda?": OrNone(TEXT),
}
_RUN = {
    "date": TEXT,
    "seed": NUMBER,
    "commit": OrNone(TEXT),
    "dirty": OrNone(FLAG),
    "sources": {"patterns": PATTERNS, "sha256": HASH},
    "hashes?": {"tests": HASH, "common": HASH, "answers": HASH},
    "machine": _MACHINE,
}
_GROUP = {
    "name": TEXT,
    "passed": COUNT,
    "total": COUNT,
    "seconds": NUMBER,
    "status": TEXT,
    "given?": FLAG,
    "only_check_build?": FLAG,
    "failures?": [TEXT],
}
_BENCHMARK = {
    "shape": TEXT,
    "dtype": TEXT,
    "ours": _TIMING,
    "baselines": Each(_TIMING),
    "speedups": Each(NUMBER),
    "note": TEXT,
    "flops?": OrNone(NUMBER),
    "bytes?": OrNone(NUMBER),
    "tflops?": _RATE,
    "gb_per_s?": _RATE,
    "run": _RUN,
}
_REFERENCE = {
    "read_gb_per_s": NUMBER,
    "fp32_tflops": NUMBER,
    "bf16_tflops": NUMBER,
    "split_tflops": NUMBER,
}
# What common.record.merge() makes of the runs of a stage.
ENTRY = {
    "stage": TEXT,
    "title": TEXT,
    "device": TEXT,
    "status": TEXT,
    "complete": FLAG,
    "groups": [_GROUP],
    "points": NUMBER,
    "earned": NUMBER,
    "fields": [TEXT],
    "benchmarks": Each(_BENCHMARK),
    "texts": Each({"text": TEXT, "run": _RUN}),
    "problems": [TEXT],
    "reference?": OrNone(_REFERENCE),
    "run": _RUN,
    "digest?": HASH,
}


def misfits(found: Any, shape: Any = ENTRY, where: str = "it") -> Iterator[str]:
    """A sentence for each place where a value does not have this shape; nothing is raised.

    Args:
        found: what ``json.loads`` returned.
        shape: see above.
        where: what sentences call the value.
    """
    if isinstance(shape, OrNone):
        if found is not None:
            yield from misfits(found, shape.shape, where)
    elif isinstance(shape, str):
        if not _FITS[shape](found):
            yield f"{where} must be {shape}; got {reprlib.repr(found)}"
    elif isinstance(shape, list):
        if not isinstance(found, list):
            yield f"{where} must be a list; got {reprlib.repr(found)}"
            return
        for number, item in enumerate(found):
            yield from misfits(item, shape[0], f"{_inside(where)}{number}")
    elif not isinstance(found, Mapping):
        yield f"{where} must be a dict; got {reprlib.repr(found)}"
    elif isinstance(shape, Each):
        for name, item in found.items():
            yield from misfits(name, TEXT, f"a name in {where}")
            yield from misfits(item, shape.shape, f"{_inside(where)}{name[:100]}")
    else:
        known = {key.removesuffix("?") for key in shape}
        yield from (
            f"{_inside(where)}{key[:100]} is no field of a record"
            for key in found
            if key not in known
        )
        for key, inner in shape.items():
            name = key.removesuffix("?")
            if name in found:
                yield from misfits(found[name], inner, f"{_inside(where)}{name}")
            elif name == key:
                yield f"{_inside(where)}{name} is missing"


def _inside(where: str) -> str:
    return "" if where == "it" else f"{where}."


def _is_text(found: Any) -> bool:
    if not isinstance(found, str) or len(found) > _LARGEST_TEXT:
        return False
    return not any("\ud800" <= c <= "\udfff" for c in found)  # half a character, in no file


def _are_patterns(found: Any) -> bool:
    """Files of this checkout, which are read for their hash."""
    return (
        isinstance(found, list)
        and len(found) <= 20
        and all(
            isinstance(pattern, str)
            and re.fullmatch(r"(task\d|common)/[\w.*/-]{1,100}", pattern)
            and ".." not in pattern
            and "**" not in pattern
            for pattern in found
        )
    )


# NaN is in no range. Python compares integers of any length with others exactly.
_FITS: dict[str, Callable[[Any], bool]] = {
    TEXT: _is_text,
    FLAG: lambda found: isinstance(found, bool),
    NUMBER: lambda found: type(found) in (int, float) and 0 <= found <= 1e18,
    COUNT: lambda found: type(found) is int and 0 <= found <= 10**9,
    HASH: lambda found: isinstance(found, str) and bool(re.fullmatch("[0-9a-f]{64}", found)),
    PATTERNS: _are_patterns,
}
