"""The text of a failed case."""

import linecache
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from common.build import BuildError, KernelError
from common.check.case import Item
from common.check.compare import CheckFailed
from common.check.frames import is_own
from common.memory import NotEnoughMemory, free_memory, gib
from common.paths import ROOT


@dataclass(frozen=True)
class Failure:
    """``category``: "wrong", "not written", "build", "kernel", "memory" or "bug"; ``text`` is complete.

    ``mistake`` is the same in all cases that fail at the same line with the same error. ``target``: the item's.
    """

    category: str
    text: str
    mistake: str = ""
    target: str = ""


def failure_of(error: Exception, item: Item, seed: int, *, rerun: bool = True) -> Failure:
    """Explain the exception that ``item.run(seed)`` raised."""
    if sentence := _not_written(error, item):
        return Failure("not written", sentence)
    if isinstance(error, BuildError):
        return Failure("build", str(error).strip())
    head = _headline(item)
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    tail = f"{notes}\nagain: {_again(item, seed)}"
    if isinstance(error, CheckFailed):
        more = _second_run(error, item, seed) if rerun else ""
        if (
            not more
            and "usually: " not in str(error)
            and item.check.kernels
            and item.target == "cpu"
        ):
            more = (
                "\nno usual cause fits; --check watches every access to memory, and may name a line"
            )
        return Failure("wrong", f"{head}\n{indent(str(error) + more + tail)}")
    if isinstance(error, (torch.cuda.OutOfMemoryError, NotEnoughMemory)):
        return Failure(
            "memory", f"{head}\n{indent(describe_out_of_memory(error, item.device) + tail)}"
        )
    if isinstance(error, RuntimeError) and "CUDA error" in str(error):
        first = str(error).splitlines()[0]
        if "out of memory" in first:  # a first call, on a GPU that is full of other processes' data
            return Failure("memory", f"{head}\n{indent(f'{first}: other processes fill it{tail}')}")
        hint = (
            f"compute-sanitizer python -m {item.stage.name}.test --check --device cuda names the line;"
            f" so does python -m {item.stage.name}.test --check --device cpu, without a GPU"
        )
        return Failure("kernel", "\n".join([head, indent(first), indent(hint + tail)]))
    if isinstance(error, KernelError):
        text = str(error).strip()
        mistake = text.partition("\n")[0].partition("[")[
            0
        ]  # its line and what is wrong, up to an index
        return Failure("kernel", f"{head}\n{indent(text + tail)}", mistake)
    if isinstance(error, AssertionError) and str(error):
        place = _last_own_frame(error.__traceback__)
        return Failure("wrong", f"{head}\n{indent(f'{error}{place}{tail}')}")
    # its traceback ends with the notes
    again = f"\nagain: {_again(item, seed)}"
    text = short_traceback(error)
    mistake = f"{error!r}{_last_own_frame(error.__traceback__)}"
    return Failure("bug", f"{head}\n{indent(text + again)}", mistake)


def describe_out_of_memory(error: Exception, device: torch.device) -> str:
    """What was needed, and what is free."""
    if isinstance(error, NotEnoughMemory):
        return str(error)
    # PyTorch's text begins "CUDA out of memory. Tried to allocate 20.00 GiB. ..."
    said = " ".join(str(error).split(". ")[:2])
    free, total = free_memory(device)
    return f"out of memory: {said}; now {gib(free)} of {gib(total)} are free"


def indent(text: str) -> str:
    return "\n".join("    " + line if line else "" for line in text.splitlines())


def _headline(item: Item) -> str:
    values = ", ".join(f"{key}={value}" for key, value in item.case.values.items())
    build = " in the check build" if item.target == "cpu-check" else ""
    return (
        f"{item.check.name.replace('_', ' ')}, case '{item.case.name}' on {item.device.type}{build}\n"
        f"    {item.case.why}" + (f" ({values})" if values else "")
    )


def _again(item: Item, seed: int) -> str:
    check = " --check" if item.target == "cpu-check" else ""
    flag = item.check.group.replace(" ", "-")
    return f"python -m {item.stage.name}.test --{flag} --device {item.device.type}{check} --seed {seed}"


def _second_run(error: CheckFailed, item: Item, seed: int) -> str:
    """Run the case again on the same inputs: only a race or uninitialised memory gives another result."""
    if not item.check.kernels or item.target == "cpu-check" or error.fingerprint is None:
        return ""
    try:
        item.run(seed)
    except CheckFailed as second:
        if second.fingerprint == error.fingerprint:
            same = "\na second run on the same inputs gave the same result: hardly a race"
            return same if item.target == "cuda" else ""  # the CPU repeats races, too
    except Exception:
        return ""
    return (
        "\na second run on the same inputs gave another result: a race (a missing barrier) or uninitialised"
        " memory; --check on the CPU names the line"
    )


def _not_written(error: Exception, item: Item) -> str | None:
    if isinstance(error, CheckFailed) and error.not_written:
        if isinstance(error.not_written, str):
            return error.not_written
        path = _source(item, ".cu" if item.check.kernels else ".py")
        return f"{path}: {item.check.group} is not written yet (the output is as it was allocated, all NaN)"
    if not isinstance(error, NotImplementedError):
        return None
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or not is_own(frames[-1].filename):
        return None  # PyTorch raises it too, for operations that are not implemented
    last = frames[-1]
    if "NotImplementedError" not in linecache.getline(last.filename, last.lineno or 0):
        return None
    said = str(error)
    path = Path(last.filename).relative_to(ROOT)
    return f"{path}: {said or f'{_function_name(error.__traceback__)} is not written yet'}"


def _function_name(tb: TracebackType | None) -> str:
    name = "it"
    while tb is not None:
        name, tb = tb.tb_frame.f_code.co_qualname, tb.tb_next
    return name


def _source(item: Item, suffix: str) -> str:
    sources = item.stage.sources
    return next(
        (s for s in sources if s.endswith(suffix)), sources[0] if sources else item.stage.name
    )


def _last_own_frame(tb: TracebackType | None) -> str:
    own = [frame for frame in traceback.extract_tb(tb) if is_own(frame.filename)]
    return f"\nat {Path(own[-1].filename).relative_to(ROOT)}:{own[-1].lineno}" if own else ""


def short_traceback(error: Exception) -> str:
    """Python's text, with the lines of the checkout only; if there are none, with the last one."""
    text = traceback.TracebackException.from_exception(error)
    own = [frame for frame in text.stack if is_own(frame.filename)]
    text.stack = traceback.StackSummary.from_list(own or text.stack[-1:])
    return "".join(text.format()).strip()
