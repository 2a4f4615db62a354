"""The builder, in a small checkout of its own: what it says when something is wrong, and what it survives."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.build import BuildError, builder, cli, planner, toolchain
from common.paths import ROOT
from common.tests.folders import KERNEL, write_kernel

SLOW = "#include <regex>\n" + KERNEL  # a header that keeps a compiler busy long enough to be killed


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of what builds kernels, with the CPU runtime."""
    root = tmp_path_factory.mktemp("checkout")
    for part in ("build", "cuda_on_cpu", "include"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "common" / part, root / "common" / part, ignore=ignored)
    (root / "common/__init__.py").touch()
    shutil.copy(ROOT / "common/paths.py", root / "common")
    builder.make([planner.cpu_runtime()])
    (root / ".build").mkdir()
    shutil.copy(planner.cpu_runtime().path, root / ".build")  # it takes seconds, and is the same
    write_kernel(root / "warm")
    done = compile_in(root, "warm")
    assert done.returncode == 0, done.stderr
    return root


@pytest.fixture
def task(checkout, request) -> str:
    """The name of a fresh task folder in the checkout, with a kernel that compiles."""
    name = re.sub(r"\W", "_", request.node.name)
    write_kernel(checkout / name)
    return name


def command(name: str, *options: str) -> list[str]:
    return [sys.executable, "-m", f"{name}.compile", "--device", "cpu", *options]


def compile_in(root: Path, name: str, *options: str, **env: str) -> subprocess.CompletedProcess:
    environment = os.environ | env
    return subprocess.run(
        command(name, *options),
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def libraries(root: Path, name: str) -> list[Path]:
    return sorted(p for p in (root / ".build").glob(f"{name}-*") if p.suffix != ".log")


def only_error(done: subprocess.CompletedProcess) -> str:
    """What a failed command said; it must be that alone."""
    assert done.returncode == 1
    assert done.stdout == ""
    for noise in ("Traceback", "ninja", "FAILED", "-std=c++17", ".build"):
        assert noise not in done.stderr
    return done.stderr


# ---- compiling


def test_says_what_it_built_and_then_that_it_is_up_to_date(checkout, task):
    first, second = compile_in(checkout, task), compile_in(checkout, task)
    assert re.fullmatch(
        rf"{task}/kernel.cu: for the CPU by \S+ \S+, built in \d+\.\d s\n", first.stdout
    )
    assert re.fullmatch(rf"{task}/kernel.cu: for the CPU by \S+ \S+, up to date\n", second.stdout)
    assert first.returncode == second.returncode == 0
    assert first.stderr == second.stderr == ""


def test_nothing_to_do_takes_no_time(checkout):
    program = (
        "import time, pathlib; from common.build import builder; import common.cuda_on_cpu; t = time.time();"
        "builder.build([pathlib.Path('warm/kernel.cu')]); print(time.time() - t)"
    )
    runs = [
        subprocess.run([sys.executable, "-c", program], cwd=checkout, capture_output=True)
        for _ in range(3)
    ]
    assert min(float(run.stdout) for run in runs) < 0.2


def test_compiling_does_not_import_torch(checkout):
    program = "import sys, common.build, common.cuda_on_cpu; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=checkout).returncode == 0


def test_a_broken_kernel_shows_the_compilers_words_and_the_students_line(checkout, task):
    write_kernel(checkout / task, KERNEL.replace("by * inp[i]", "bye * inp[i]"))
    said = only_error(compile_in(checkout, task))
    assert f"{task}/kernel.cu:7:" in said
    assert "bye" in said
    assert not libraries(checkout, task)


def test_a_broken_header_is_named(checkout, task):
    (checkout / task / "factor.cuh").write_text("#pragma once\n#define FACTOR 1.0f\nint = 3;\n")
    assert f"{task}/factor.cuh:3:" in only_error(compile_in(checkout, task))


@pytest.mark.parametrize(
    "line, words",
    [
        (
            "__device__ void hidden(float* x);\n__global__ void k(float* x) { hidden(x); }",
            "hidden(float*)",
        ),
        (
            "float f(float* x) { return atomicAdd(x, 1, 2); }",
            "/kernel.cu:1",
        ),  # which includes our headers
    ],
    ids=["linker", "compiler"],
)
def test_no_message_names_a_copy(checkout, task, line, words):
    write_kernel(checkout / task, KERNEL + line + "\n")
    assert words in only_error(compile_in(checkout, task))  # no .build in it


def test_no_warning_names_a_copy(checkout, task):
    (checkout / task / "odd.cuh").write_text("#pragma once\ninline int odd() {}\n")
    write_kernel(checkout / task, '#include "odd.cuh"\n' + KERNEL)
    done = compile_in(checkout, task)
    assert (
        f"{task}/odd.cuh:2:" in done.stdout + done.stderr
        and ".build" not in done.stdout + done.stderr
    )
    (log,) = (checkout / ".build").glob(f"{task}-*.log")
    assert f"from {task}/kernel.cu:1" in log.read_text() and "work-" not in log.read_text()


def test_one_that_compiles_is_there_although_another_does_not(tmp_path):
    good, bad = write_kernel(tmp_path / "good"), write_kernel(tmp_path / "bad", KERNEL + "oops\n")
    with pytest.raises(BuildError, match=r"bad/kernel\.cu:\d+"):
        builder.build([bad, good])
    assert planner.plan(good, "cpu").path.exists()


@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc on PATH")
def test_a_kernel_broken_for_the_gpu_alone(checkout, task):
    write_kernel(checkout / task, KERNEL.replace("by * inp[i]", "bye * inp[i]"))
    done = subprocess.run(
        [sys.executable, "-m", f"{task}.compile", "--arch", "90a"],
        cwd=checkout,
        capture_output=True,
        text=True,
    )
    assert f'{task}/kernel.cu(7): error: identifier "bye" is undefined' in only_error(done)


def test_old_builds_are_removed_but_none_that_was_just_used(checkout, task):
    assert compile_in(checkout, task).returncode == 0
    (library,) = libraries(checkout, task)
    for i in range(2 * builder.KEEP):
        other = library.with_name(re.sub(r"[0-9a-f]{16}", f"{i:016x}", library.name))
        other.touch()
        if i % 2:
            os.utime(other, (1e9 + i, 1e9 + i))
    write_kernel(checkout / task, KERNEL + "// edited\n")
    assert compile_in(checkout, task).returncode == 0
    left = libraries(checkout, task)
    assert library in left
    assert len(left) == builder.KEEP + 2


# ---- for one architecture alone


@pytest.fixture
def for_hopper(checkout, task) -> str:
    write_kernel(checkout / task, "// architectures: sm_90a sm_100a\n" + KERNEL)
    return task


def test_a_source_that_is_for_some_gpus_alone_is_not_built_for_the_cpu(checkout, for_hopper):
    said = only_error(compile_in(checkout, for_hopper))
    assert said == f"{for_hopper}/kernel.cu is for sm_90a and sm_100a alone, and not for the CPU\n"


def test_building_everything_leaves_out_what_is_for_others(checkout):
    folder = checkout / "task9"  # of all folders here the only one that is a task's
    write_kernel(folder, "// architectures: sm_90a\n" + KERNEL)
    try:
        build = [sys.executable, "-m", "common.build", "--device", "cpu"]
        done = subprocess.run(build, cwd=checkout, capture_output=True, text=True)
    finally:
        shutil.rmtree(folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "task9/kernel.cu: not for the CPU, only for sm_90a\n"


# ---- being killed, being two, being moved


def test_killed_at_any_moment_and_built_again(checkout, task):
    for seconds in (0.1, 0.2, 0.3, 0.5):
        write_kernel(checkout / task, KERNEL + f"// {seconds}\n")
        with subprocess.Popen(
            command(task), cwd=checkout, stdout=subprocess.DEVNULL, start_new_session=True
        ) as process:
            time.sleep(seconds)
            os.killpg(process.pid, signal.SIGKILL)
        for library in libraries(checkout, task):
            assert "scale" in launchers_in(library)  # a whole one or none
        done = compile_in(checkout, task)
        assert (done.returncode, done.stderr) == (0, "")


def test_killed_while_the_compiler_runs(checkout, task):
    write_kernel(checkout / task, SLOW)
    before = work_folders(checkout)
    with subprocess.Popen(
        command(task), cwd=checkout, stdout=subprocess.DEVNULL, start_new_session=True
    ) as process:
        wait_for(lambda: [f for f in work_folders(checkout) - before if list(f.glob("*.log"))])
        os.killpg(process.pid, signal.SIGKILL)
    assert not libraries(checkout, task)
    assert work_folders(checkout) - before  # what is left of it does no harm
    assert "built in" in compile_in(checkout, task).stdout


def test_only_python_killed_while_the_compiler_runs_on(checkout, task):
    before = work_folders(checkout)
    with subprocess.Popen(command(task), cwd=checkout, stdout=subprocess.DEVNULL) as process:
        wait_for(lambda: [f for f in work_folders(checkout) - before if list(f.glob("*.log"))])
        process.kill()
    assert compile_in(checkout, task).returncode == 0
    wait_for(lambda: libraries(checkout, task))
    assert "scale" in launchers_in(libraries(checkout, task)[0])


def test_the_folder_of_a_killed_build_is_swept_up_later(checkout, task):
    old, young = checkout / ".build/work-old", checkout / ".build/work-young"
    old.mkdir()
    young.mkdir()
    os.utime(old, (1e9, 1e9))
    assert compile_in(checkout, task).returncode == 0
    assert not old.exists()
    assert young.exists()
    young.rmdir()


def test_two_builds_at_once(checkout, task):
    before = work_folders(checkout)
    both = [
        subprocess.Popen(
            command(task), cwd=checkout, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(2)
    ]
    said = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert len(libraries(checkout, task)) == 1
    assert work_folders(checkout) == before
    assert "scale" in launchers_in(libraries(checkout, task)[0])


def test_a_moved_checkout_works_and_has_nothing_to_do(checkout, tmp_path):
    moved = tmp_path / "with a space"
    shutil.copytree(checkout, moved)
    shutil.move(checkout / ".build", checkout / ".gone")  # the copy must not lean on the original
    try:
        assert "up to date" in compile_in(moved, "warm").stdout
        assert "scale" in launchers_in(libraries(moved, "warm")[0])
        write_kernel(moved / "new")
        assert compile_in(moved, "new").returncode == 0
        assert not (checkout / ".build").exists()
    finally:
        shutil.move(checkout / ".gone", checkout / ".build")


def work_folders(root: Path) -> set[Path]:
    return set((root / ".build").glob("work-*"))


def launchers_in(library: Path) -> list[str]:
    """The launcher, if the library is whole: found out in a process of its own, which half a one may kill."""
    program = f"import ctypes; ctypes.CDLL({str(library)!r}).scale; print('scale')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    return done.stdout.split()


def wait_for(condition, seconds: float = 60) -> None:
    end = time.time() + seconds
    while not condition():
        assert time.time() < end
        time.sleep(0.02)


# ---- nothing to build with


def test_no_compiler(checkout, task):
    said = only_error(compile_in(checkout, task, PATH="/nowhere", CXX=""))
    assert said.startswith("no C++ compiler found: looked for ")
    assert said.count("\n") == 1


def test_cxx_that_does_not_run(checkout, task):
    assert "CXX names '/nowhere/g++'" in only_error(compile_in(checkout, task, CXX="/nowhere/g++"))


def test_a_full_disk_is_named_whatever_the_compiler_said(checkout, task):
    broken = KERNEL.replace("int64_t i =", "int64_t i")
    write_kernel(checkout / task, broken)
    said = only_error(compile_in(checkout, task, TMPDIR="/nowhere"))
    assert re.fullmatch(r"cannot write \d+ MB into /nowhere: No such file or directory\n", said)


def test_a_disk_that_fills_up_while_a_build_is_prepared(monkeypatch, tmp_path):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(planner, "BUILD", tmp_path / "built")
    monkeypatch.setattr(builder, "_rewrite", full)
    with pytest.raises(BuildError, match="cannot build in .*built: No space left on device$"):
        builder.build([write_kernel(tmp_path)], "cpu")
    assert not list((tmp_path / "built").iterdir())


def test_no_ninja(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Path(toolchain.find_ninja()).is_file()  # the package's own
    monkeypatch.setattr("ninja.BIN_DIR", "")
    with pytest.raises(BuildError, match="pip install ninja"):
        toolchain.find_ninja()
    monkeypatch.setitem(sys.modules, "ninja", None)
    with pytest.raises(BuildError, match="pip install ninja"):
        toolchain.find_ninja()


def test_a_checkout_in_a_folder_with_an_odd_name(checkout, tmp_path):
    moved = tmp_path / "a $dollar: 100 %  'two' spaces"
    shutil.copytree(checkout, moved)
    write_kernel(moved / "odd $ name")
    program = "import pathlib; from common.build import builder; print(builder.build([pathlib.Path('odd $ name/kernel.cu')])[0])"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=moved, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "scale" in launchers_in(Path(done.stdout.strip()))


def test_registers_and_spills_from_what_ptxas_says():
    said = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1kPf' for 'sm_90a'
ptxas info    : Function properties for _Z1kPf
    8 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 8192 bytes smem, 400 bytes cmem[0]
ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...
kernel.cu(3): warning #177-D: variable "x" was declared but never referenced
"""
    (line,) = cli.resources(said)
    assert line.endswith(
        ": 40 registers, 8192 B static shared memory, spills 16 B stored, 24 B loaded"
    )
    loss, warning = builder.readable(said).splitlines()
    assert "(C7515) Potential Performance Loss" in loss
    assert warning.startswith("kernel.cu(3): warning")
