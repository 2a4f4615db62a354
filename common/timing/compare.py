"""Timing functions that should give the same result, some of which may not run here."""

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from common.timing.measure import Timing, measure


@dataclass
class Measured:
    """What was measured on the same inputs, by name: times, or the reason that there is none."""

    times: dict[str, Timing] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def compare_times(
    functions: Mapping[str, Callable[[], Tensor]],
    *,
    references: Sequence[str],
    tolerance: float,
    each: float,
) -> Measured:
    """Time functions on the current GPU, interleaved. Left out is what does not run, or gives another result.

    Args:
        functions: what to time, by name.
        references: names of those whose results are trusted; the last one that runs is the one that counts. Without
            any, results are not compared.
        tolerance: by how much a result may differ from it, in units of its largest value.
        each: seconds of measuring for each function, see :func:`common.timing.measure`.
    """
    outcomes = {name: seconds_of(function) for name, function in functions.items()}
    left_out = {name: found for name, found in outcomes.items() if isinstance(found, str)}
    trusted = [name for name in references if name in functions and name not in left_out]

    def leave_out_wrong(outputs: Mapping[str, Tensor]) -> None:
        truth = outputs[trusted[-1]].float()
        allowed = tolerance * truth.abs().max()
        for name, out in outputs.items():
            error = (out.float() - truth).abs().max()
            if not error <= allowed:
                left_out[name] = f"wrong result: {error.item():.3g} away from {trusted[-1]}"

    times = measure(
        {name: function for name, function in functions.items() if name not in left_out},
        each=each,
        check=leave_out_wrong if trusted else None,
    )
    return Measured({name: t for name, t in times.items() if name not in left_out}, left_out)


_EMPTY = "kernel not used because|disabled"  # warnings of SDPA that give no reason


def seconds_of(function: Callable[[], object]) -> float | str:
    """How long a call takes on the current GPU, after a first one; or why it fails, in a line."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            function()
            start.record()
            function()
            end.record()
            end.synchronize()
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        return "out of memory"
    except ImportError as error:
        return str(error)
    except (RuntimeError, ValueError) as error:  # for a backend of SDPA its warnings say why
        parts = [str(warning.message).partition(" (Triggered") for warning in said]
        useful = [text for text, found, _ in parts if found and not re.search(_EMPTY, text)]
        text = useful[-1] if useful else str(error).splitlines()[0]
        return re.sub(r"(?<!\S)/\S*/", "", " ".join(text.split()))  # without the library's folders
    return start.elapsed_time(end) / 1e3
