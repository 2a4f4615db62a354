"""A suite of checks: what it runs, says and counts, what memory it takes, and how pytest runs it."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from common.check import (
    Case,
    CheckFailed,
    Rng,
    assert_close,
)
from common.check.failure import failure_of
from common.memory import NotEnoughMemory, fit_batch, require_memory
from common.paths import ROOT
from common.tests.answers import HEADS, good, make_suite, run

# The suite ---------------------------------------------------------------------------------------


def test_items_by_target() -> None:
    suite = make_suite()
    cases = [
        Case("a", why="", small=True),
        Case("b", why=""),
        Case("c", why="", devices=("cuda",)),
    ]
    suite.check("softmax", cases)(lambda case, device, rng: None)

    @suite.check("gemm", cases, kernels=False)
    def other(case: Case, device: torch.device, rng: Rng) -> None: ...

    targets = ["cpu", "cpu-check", "cuda"]
    found = [(item.check.group, item.case.name, item.target) for item in suite.items(targets)]
    assert found == [
        ("softmax", "a", "cpu"),
        ("softmax", "b", "cpu"),
        ("softmax", "a", "cpu-check"),
        ("softmax", "a", "cuda"),
        ("softmax", "b", "cuda"),
        ("softmax", "c", "cuda"),
        ("gemm", "a", "cpu"),
        ("gemm", "b", "cpu"),
        ("gemm", "a", "cuda"),
        ("gemm", "b", "cuda"),
        ("gemm", "c", "cuda"),
    ]
    assert [item.case.name for item in suite.items(["cuda"], small=True)] == ["a", "a"]
    assert suite.groups == ["softmax", "gemm"]


def test_names_must_be_unique() -> None:
    suite = make_suite()
    with pytest.raises(ValueError, match="same name"):
        suite.check("softmax", [Case("a", why=""), Case("a", why="")])
    suite.check("softmax", [])(test_names_must_be_unique)
    with pytest.raises(ValueError, match="two checks"):
        suite.check("softmax", [])(test_names_must_be_unique)


def test_a_case_has_no_other_attributes() -> None:
    with pytest.raises(AttributeError, match="case 'a' has no 'rows'"):
        Case("a", why="").rows  # noqa: B018


def test_outputs_are_poisoned_and_inputs_repeat(capsys: pytest.CaptureFixture[str]) -> None:
    suite, seen = make_suite(), []

    @suite.check("softmax", [Case("a", why=""), Case("b", why="")], kernels=False)
    def look(case: Case, device: torch.device, rng: Rng) -> None:
        assert bool(torch.empty(3).isnan().all())
        seen.append(rng.randn(3))

    assert run(suite, "--seed", "5") == 0 and run(suite, "--seed", "5") == 0
    assert torch.equal(seen[0], seen[2]) and torch.equal(seen[1], seen[3])
    assert not torch.equal(seen[0], seen[1])
    out = capsys.readouterr().out
    assert "task9: a stage (cpu, --seed 5)" in out and "  softmax    2 of 2 " in out
    assert run(suite) == 0 and run(suite) == 0
    assert not torch.equal(seen[4], seen[6]), "a new seed each run"


def test_at_most_three_failures_are_shown_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    suite = make_suite()

    @suite.check("softmax", [Case(f"n{i}", why=f"reason {i}", rows=i) for i in range(5)])
    def wrong(case: Case, device: torch.device, rng: Rng) -> None:
        got, truth, pytorch = good()
        assert_close(got + 1, truth, pytorch, axes=HEADS)

    @suite.check("gemm", [Case("a", why="")])
    def right(case: Case, device: torch.device, rng: Rng) -> None: ...

    assert run(suite, "--seed", "11") == 1
    out = capsys.readouterr().out
    assert "softmax    0 of 5" in out and "gemm       1 of 1" in out
    assert "wrong, case 'n0' on cpu\n        reason 0 (rows=0)" in out
    assert "case 'n2'" in out and "case 'n3'" not in out and "and 2 more" in out
    assert "again: python -m task9.test --softmax --device cpu --seed 11" in out
    assert run(suite, "--gemm") == 0
    assert "softmax" not in capsys.readouterr().out


def test_a_changing_result_is_called_a_race(capsys: pytest.CaptureFixture[str]) -> None:
    suite, calls = make_suite(), []

    @suite.check("softmax", [Case("a", why="")])
    def racy(case: Case, device: torch.device, rng: Rng) -> None:
        calls.append(1)
        got, truth, pytorch = good()
        got[0, 0, len(calls), 3] = 9
        assert_close(got, truth, pytorch, axes=HEADS)

    assert run(suite) == 1
    assert "a second run on the same inputs gave another result: a race" in capsys.readouterr().out


def test_stubs_give_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    suite = make_suite()
    cases = [Case("a", why=""), Case("b", why="")]

    @suite.check("softmax", cases)
    def empty(case: Case, device: torch.device, rng: Rng) -> None:
        got, truth, pytorch = good()
        assert_close(torch.empty_like(got), truth, pytorch, axes=HEADS)

    @suite.check("gemm", cases)
    def stub(case: Case, device: torch.device, rng: Rng) -> None:
        def gemm() -> None:
            raise NotImplementedError

        gemm()

    assert run(suite) == 1
    out = capsys.readouterr().out
    assert out.count("task9/attention_kernel.cu: softmax is not written yet") == 1
    assert out.count("common/tests/test_check_suite.py: ") == 1
    assert "stub.<locals>.gemm is not written yet" in out
    assert out.count("  not written\n") == 2 and "Traceback" not in out


def test_a_bug_shows_a_short_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    suite = make_suite()

    @suite.check("softmax", [Case("a", why="")])
    def buggy(case: Case, device: torch.device, rng: Rng) -> None:
        raise KeyError("lost")

    @suite.check("softmax", [Case("a", why="")])
    def pytorch_lacks_it(case: Case, device: torch.device, rng: Rng) -> None:
        torch.empty(3, device="meta").item()

    @suite.check("softmax", [Case("a", why="")])
    def plain(case: Case, device: torch.device, rng: Rng) -> None:
        raise AssertionError("tokens differ")

    assert run(suite) == 1
    out = capsys.readouterr().out
    assert "KeyError: 'lost'" in out and "common/check/suite.py" not in out
    assert "not written yet" not in out
    assert "tokens differ\n        at common/tests/test_check_suite.py:" in out


def test_a_failed_build_shows_the_compilers_words_and_ends(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from common.build import BuildError

    suite, calls = make_suite(), []

    @suite.check("softmax", [Case("a", why=""), Case("b", why="")])
    def unbuilt(case: Case, device: torch.device, rng: Rng) -> None:
        calls.append(1)
        raise BuildError("task9/attention_kernel.cu:3:5: error: expected ';'")

    @suite.check("gemm", [Case("a", why="")])
    def after(case: Case, device: torch.device, rng: Rng) -> None: ...

    assert run(suite) == 1
    out = capsys.readouterr().out
    assert "    task9/attention_kernel.cu:3:5: error: expected ';'\n" in out
    assert calls == [1] and "Traceback" not in out
    assert "  did not build\n" in out and "  gemm     not run\n" in out


def test_a_cuda_error_says_how_to_find_it() -> None:
    suite = make_suite()

    @suite.check("softmax", [Case("a", why="b")])
    def crash(case: Case, device: torch.device, rng: Rng) -> None: ...

    error = RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with ...")
    failure = failure_of(error, next(suite.items(["cpu"])), 3)
    assert failure.category == "kernel" and "Compile with" not in failure.text
    assert "    CUDA error: an illegal memory access was encountered\n" in failure.text
    assert "compute-sanitizer python -m task9.test --check --device cuda" in failure.text


def test_ctrl_c_ends_cleanly(capsys: pytest.CaptureFixture[str]) -> None:
    suite = make_suite()

    @suite.check("softmax", [Case("a", why="")])
    def interrupted(case: Case, device: torch.device, rng: Rng) -> None:
        raise KeyboardInterrupt

    assert run(suite) == 130
    assert capsys.readouterr().err.strip() == "interrupted"


def test_the_check_build_runs_every_setting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import contextlib

    from common.check import case as case_module

    settings = []

    @contextlib.contextmanager
    def using(**options: object):
        settings.append((options["check"], options["order"], options["eager_copies"]))
        yield

    monkeypatch.setattr(case_module, "using", using)
    suite = make_suite()

    @suite.check("softmax", [Case("a", why="", small=True), Case("b", why="")])
    def look(case: Case, device: torch.device, rng: Rng) -> None:
        if settings[-1][1] == "random":
            raise CheckFailed("no")

    assert run(suite, "--check") == 1
    assert settings == [
        (True, "forward", False),
        (True, "reverse", True),
        (True, "random", False),
    ]
    out = capsys.readouterr().out
    assert "check build, small cases, each in 4 orders of threads" in out
    assert "in the check build: threads of a block in random order" in out
    assert "0 of 1" in out


# Memory ------------------------------------------------------------------------------------------


def test_memory_is_printed_before_it_is_allocated(capsys: pytest.CaptureFixture[str]) -> None:
    require_memory(3 << 20, "cpu", "the weights")
    assert "the weights: needs 3 MiB, " in capsys.readouterr().out
    with pytest.raises(NotEnoughMemory, match="the weights needs 1048576.0 GiB; .* are free"):
        require_memory(1 << 50, "cpu", "the weights")


def test_the_batch_is_halved_until_it_fits() -> None:
    assert fit_batch(64, lambda batch: batch << 10, "cpu", "attention") == (64, "")
    batch, note = fit_batch(64, lambda batch: float(batch == 64) * 2**60, "cpu", "attention")
    assert batch == 32 and note.startswith("scaled down: batch 64 needs 1073741824.0 GiB")
    with pytest.raises(NotEnoughMemory, match="for a single sequence"):
        fit_batch(64, lambda batch: 2**60, "cpu", "attention")


def test_out_of_memory_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    suite = make_suite()

    @suite.check("softmax", [Case("a", why="")])
    def hungry(case: Case, device: torch.device, rng: Rng) -> None:
        raise torch.cuda.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 1 GiB"
        )

    assert run(suite) == 1
    out = capsys.readouterr().out
    assert "Tried to allocate 20.00 GiB; now" in out and "are free" in out


# pytest ------------------------------------------------------------------------------------------


def test_a_suite_under_pytest(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["common.check.pytest_plugin"]\n')
    (tmp_path / "answer.py").write_text("def test_batched_softmax(inp, dim): ...\n")
    (tmp_path / "test_stage.py").write_text(
        textwrap.dedent("""
            import torch
            from answer import test_batched_softmax
            from common.check import Case, Suite, assert_close

            suite = Suite("task9", title="")

            @suite.check("a", [Case("it works", why="x"), Case("seed", why="y")], kernels=False)
            def adds(case, device, rng):
                x = rng.randn(3)
                print("numbers", case.name, x.tolist())
                off = 0.5 if case.name == "seed" else 0
                assert_close(x + off, x.double(), x, axes=("row",))

            test_task9 = suite.pytest()
        """)
    )

    arguments = ["-v", "-rP", "-p", "no:cacheprovider", "--seed", "77"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=tmp_path,
        env=os.environ
        | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
    )
    out = done.stdout
    assert "test_task9[adds-it_works-cpu] PASSED" in out
    assert "test_task9[adds-seed-cpu] FAILED" in out and "1 failed, 1 passed" in out
    assert "largest error 0.5" in out and "Traceback" not in out and "run_item" not in out
    assert "--seed 77" in out
    numbers = Rng(77, "cpu", "task9", "adds", "it works").randn(3)
    assert f"numbers it works {numbers.tolist()}" in out


def test_failures_name_the_case_and_the_reason() -> None:
    suite = make_suite()

    @suite.check("softmax", [Case("ragged tail", why="one past a tile", rows=65)], kernels=False)
    def wrong(case: Case, device: torch.device, rng: Rng) -> None: ...

    item = next(suite.items(["cpu"]))
    failure = failure_of(CheckFailed("off"), item, 3)
    assert failure.category == "wrong"
    assert failure.text.startswith(
        "wrong, case 'ragged tail' on cpu\n    one past a tile (rows=65)"
    )
