"""The doctor: it says what to do about what is broken, and survives it."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common import doctor
from common.build import toolchain
from common.doctor import FINE, MISSING, TO_DO, Finding, examined

GPU = toolchain.Gpu("NVIDIA Test", (9, 0), (13, 0))


def only(examine) -> Finding:
    (found,) = examined(examine)
    return found


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_gpu", lambda: None)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_gpu", lambda: GPU)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of its own, with nothing built."""
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    shutil.copy(Path(doctor.__file__).parents[1] / "pyproject.toml", tmp_path)
    (tmp_path / "Results.md").touch()
    return tmp_path


def test_this_machine_works(capsys: pytest.CaptureFixture) -> None:
    assert doctor.main([]) == 0
    said = capsys.readouterr().out
    for name in doctor.EXAMINATIONS:
        assert f" {name} " in said
    assert "missing" not in said and "Ready." in said


def test_one_that_breaks_does_not_hide_the_others(monkeypatch, capsys) -> None:
    def broken():
        yield Finding(FINE, "so far")
        raise RuntimeError("it broke\nhere")

    def lacks():
        yield Finding(MISSING, "get one")

    monkeypatch.setattr(doctor, "EXAMINATIONS", {"first": broken, "second": lacks})
    assert doctor.main([]) == 1
    assert capsys.readouterr().out.splitlines()[:3] == [
        "fine     first      so far",
        "to do    first      could not be examined (RuntimeError: it broke)",
        "missing  second     get one",
    ]


# Python and its packages --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "version, declared, inside",
    [
        ("3.11.7", ">=3.11,<3.14", True),
        ("3.14.0", ">=3.11,<3.14", False),
        ("3.10.9", ">=3.11,<3.14", False),
        ("2.13.0+cpu", ">=2.11,<2.16", True),
        ("2.16.0a0", ">=2.11,<2.16", False),
        ("9", ">=9.0", True),
        ("1.2", "==1.2.0", True),
        ("1.2", "", True),
    ],
)
def test_ranges(version: str, declared: str, inside: bool) -> None:
    assert doctor._inside(version, declared) is inside


def test_an_old_python(monkeypatch) -> None:
    monkeypatch.setattr("platform.python_version", lambda: "3.9.2")
    found = only(doctor.python)
    assert found.state == MISSING and "3.9.2 is not >=3.11,<3.14" in found.text


def test_packages_that_are_not_there_or_too_old(monkeypatch) -> None:
    real = doctor.importlib.metadata.version

    def version(name: str) -> str:
        if name in ("torch", "rich"):
            raise doctor.importlib.metadata.PackageNotFoundError(name)
        return "4.2" if name == "transformers" else real(name)

    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    found = [f for f in examined(doctor.packages) if f.state == MISSING]
    assert "transformers 4.2 is not >=" in found[0].text
    assert "not installed in this Python: torch, rich." in found[1].text


def test_without_any_package_it_still_reports(tmp_path: Path) -> None:
    """As on a new machine: no site-packages, no compiler on PATH."""
    done = subprocess.run(
        [sys.executable, "-S", "-m", "common.doctor"],
        cwd=Path(doctor.__file__).parents[1],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("missing")]
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
    assert [line.split()[1] for line in lines] == ["packages", "compiler", "ninja"]
    assert "no C++ compiler found" in done.stdout and "sudo apt install g++" in done.stdout


def test_a_torch_that_cannot_be_imported(monkeypatch) -> None:
    monkeypatch.setattr(doctor, "TORCH", "raise OSError('libtorch.so: cannot open')")
    found = only(doctor.torch)
    assert found.state == MISSING and "libtorch.so: cannot open" in found.text
    monkeypatch.setattr(doctor, "TORCH", "import os; os.abort()")
    assert only(doctor.torch).state == MISSING


@pytest.mark.parametrize(
    "facts, state, says",
    [
        ({"cuda": None}, TO_DO, "is for the CPU, and there is a GPU"),
        ({"available": False}, TO_DO, "does not see the GPU"),
        ({"architectures": ["sm_70", "sm_80"]}, TO_DO, "has no code for sm_90, only for sm_70, sm_80"),
        ({"architectures": ["sm_80", "compute_80"]}, FINE, "sees the GPU"),
        ({"architectures": ["sm_90a"]}, FINE, "sees the GPU"),
    ],
)  # fmt: skip
def test_torch_beside_a_gpu(monkeypatch, gpu, facts: dict, state: str, says: str) -> None:
    known = {"version": "2.13.0", "cuda": "13.0", "available": True, "architectures": [], "capability": [9, 0]}  # fmt: skip
    text = json.dumps(known | facts)
    monkeypatch.setattr(doctor, "TORCH", f"print({text!r})")
    found = only(doctor.torch)
    assert found.state == state and says in found.text


# Compilers ----------------------------------------------------------------------------------------


@pytest.fixture
def compilers(monkeypatch: pytest.MonkeyPatch):
    """The toolchain remembers what it found: forget it before and after."""
    toolchain.cpp_compiler.cache_clear()
    yield monkeypatch
    toolchain.cpp_compiler.cache_clear()


def test_no_compiler(compilers, tmp_path: Path) -> None:
    compilers.setenv("PATH", str(tmp_path))
    compilers.delenv("CXX", raising=False)
    found = only(doctor.compiler)
    assert found.state == MISSING and "no C++ compiler found" in found.text


@pytest.mark.parametrize(
    "body, says",
    [
        ("echo 'unrecognized option -std=c++17' >&2; exit 1", "does not compile C++17: unrecognized"),
        ('while [ "$1" != -o ]; do shift; done; printf "#!/bin/sh\\nexit 7\\n" > "$2"; chmod +x "$2"', "(exit status 7)"),
    ],
)  # fmt: skip
def test_a_compiler_that_is_too_old_or_for_another_machine(
    compilers, tmp_path: Path, body: str, says: str
) -> None:
    fake = tmp_path / "old-g++"
    fake.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo "g++ (GCC) 4.8.5" && exit 0\n{body}\n'
    )
    fake.chmod(0o755)
    compilers.setenv("CXX", str(fake))
    found = only(doctor.compiler)
    assert found.state == MISSING and says in found.text


def test_no_ninja(monkeypatch) -> None:
    def none() -> str:
        raise toolchain.BuildError("ninja not found: install it with `pip install ninja`.")

    monkeypatch.setattr(toolchain, "find_ninja", none)
    found = only(doctor.ninja)
    assert found.state == MISSING and "pip install ninja" in found.text


def test_nvcc_is_asked_for_where_there_is_a_gpu(monkeypatch, gpu) -> None:
    def none(*_: object) -> None:
        raise toolchain.BuildError("no CUDA compiler found: there is no nvcc on PATH.")

    monkeypatch.setattr(toolchain, "nvcc_for", none)
    found = only(doctor.nvcc)
    assert found.state == TO_DO and found.text.endswith("Or: make cuda-compiler")


def test_without_a_gpu_nothing_of_cuda_is_needed(no_gpu, monkeypatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert {only(f).state for f in (doctor.nvcc, doctor.profiler)} == {FINE}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert only(doctor.gpu) == Finding(
        FINE, "hidden by CUDA_VISIBLE_DEVICES: everything runs on the CPU"
    )


@pytest.mark.parametrize("allowed", [False, True])
def test_the_profilers_permission(monkeypatch, gpu, tmp_path: Path, allowed: bool) -> None:
    parameters = tmp_path / "params"
    parameters.write_text("ResmanDebugLevel: 4294967295\nRmProfilingAdminOnly: 1\n")
    monkeypatch.setattr(doctor, "PARAMETERS", parameters)
    monkeypatch.setattr(doctor, "_may_profile", lambda: allowed)
    monkeypatch.setattr(shutil, "which", lambda name: f"/opt/{name}")
    found = only(doctor.profiler)
    assert found.state == (FINE if allowed else TO_DO)
    assert ("/opt/ncu may read" if allowed else "for the administrator alone") in found.text


# The machine and the checkout ---------------------------------------------------------------------


def test_little_memory_and_a_full_disk(monkeypatch, root: Path) -> None:
    monkeypatch.setattr(doctor, "MEMORY", 2**60)
    monkeypatch.setattr(doctor, "DISK", 2**60)
    assert only(doctor.memory).state in (TO_DO, FINE)  # fine where the system does not tell
    found = only(doctor.disk)
    assert found.state == TO_DO and "are needed" in found.text


def test_the_limit_of_a_container_counts(monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{4 * doctor.GIB}\n")
    (tmp_path / "memory.current").write_text(f"{3 * doctor.GIB}\n")
    monkeypatch.setattr(doctor, "CGROUP", tmp_path)
    assert doctor._left_to_container() == doctor.GIB
    (tmp_path / "memory.max").write_text("max\n")
    assert doctor._left_to_container() == float("inf")


def test_a_checkout_that_cannot_be_written_to(monkeypatch, root: Path) -> None:
    assert only(doctor.checkout).state == FINE

    def refuse(**_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)
    found = only(doctor.checkout)
    assert found.state == MISSING and f"{root} (Read-only file system)" in found.text


def test_a_missing_results_file(root: Path) -> None:
    (root / "Results.md").unlink()
    found = only(doctor.checkout)
    assert found.state == MISSING and "Results.md (missing" in found.text


def test_what_builds_have_left(root: Path, monkeypatch) -> None:
    assert only(doctor.builds) == Finding(FINE, "nothing was built yet")
    (root / ".build/work-abc").mkdir(parents=True)
    (root / ".build/task2.so").write_bytes(b"x")
    assert only(doctor.builds).state == FINE
    (root / ".build/task4.so").touch()
    long_ago = time.time() - 2 * doctor.KILLED
    os.utime(root / ".build/work-abc", (long_ago, long_ago))
    monkeypatch.setattr(doctor, "BUILT", 0)
    found = only(doctor.builds)
    assert found.state == TO_DO
    for part in ("1 builds are empty files", "1 builds were killed", "are used", "make clean"):
        assert part in found.text


def test_a_changed_kernel_is_named(root: Path) -> None:
    (root / ".build").mkdir()
    (root / "task2").mkdir()
    (root / "task2/attention_kernel.cu").write_text("#include <cuda_runtime.h>\n")
    assert "task2 will be built by the next test" in only(doctor.builds).text
