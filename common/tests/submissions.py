"""What the tests of submissions share: folders and zips of files, and what is read of them."""

import struct
import warnings
import zipfile

import pytest

from common.staff.grade.submission import Submission, SubmissionError, read

KERNEL, ANSWER = "task2/attention_kernel.cu", "task1/attention.py"
WANTED = (KERNEL, ANSWER)
GOOD = {KERNEL: b"// kernel\n", ANSWER: b"# answer\n"}
LOCAL, CENTRAL, END = b"PK\3\4", b"PK\1\2", b"PK\5\6"


def folder(path, files=GOOD):
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


def zipped(path, files=GOOD, *, mode=0, method=zipfile.ZIP_DEFLATED):
    """A zip with these names as they are: zipfile changes names only where a ZipInfo is made."""
    items = files.items() if isinstance(files, dict) else files
    with zipfile.ZipFile(path, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that are there twice
        for name, data in items:
            info = zipfile.ZipInfo("x")
            info.filename, info.compress_type, info.external_attr = name, method, mode << 16
            archive.writestr(info, data)
    return path


def patch(path, place, offset, form, value):
    """Write a number into the first header of a kind."""
    data = bytearray(path.read_bytes())
    struct.pack_into(f"<{form}", data, data.index(place) + offset, value)
    path.write_bytes(data)


def contents(path, wanted=WANTED):
    return read(Submission("name", path), wanted)


def problem(path, wanted=WANTED):
    """The only problem of what is otherwise good."""
    found = contents(path, wanted)
    assert len(found.problems) == 1, found.problems
    return found.problems[0]


def error(path):
    with pytest.raises(SubmissionError) as info:
        contents(path)
    assert "\n" not in str(info.value)
    return str(info.value)
