"""Lines of the checkout in a stack of calls."""

from pathlib import Path
from types import FrameType

from common.paths import ROOT

_ROOT, _HERE = f"{ROOT}/", f"{Path(__file__).parent}/"


def is_own(file: str) -> bool:
    """Whether a file is part of the checkout, but not of this package."""
    return file.startswith(_ROOT) and not file.startswith(_HERE) and "site-packages" not in file


def own_line(frame: FrameType | None) -> str:
    """``task2/attention.py:57``: the innermost line of the checkout that is not in this package; or ``?``."""
    while frame is not None:
        name = frame.f_code.co_filename
        if is_own(name):
            return f"{name.removeprefix(_ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"
