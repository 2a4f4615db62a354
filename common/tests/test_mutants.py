"""The mutants fit the solutions, and the program that runs them tells a kill from everything else."""

from collections import Counter

import pytest
from rich.console import Console

from common.paths import ROOT
from common.staff import mutate
from common.staff.mutate import Mutant, Outcome, load


def test_every_mutant_fits_its_file() -> None:
    mutants = load()
    assert len(mutants) >= 100
    names = Counter((mutant.stage, mutant.name) for mutant in mutants)
    assert max(names.values()) == 1, names.most_common(3)
    for mutant in mutants:
        text = (ROOT / mutant.file).read_text(encoding="utf-8")
        assert mutant.applied(text) != text
        groups = importlib_groups(mutant.stage)
        assert mutant.group is None or mutant.group in groups, (mutant.name, mutant.group)


def importlib_groups(stage: str) -> list[str]:
    import importlib

    return importlib.import_module(f"{stage}.test").suite.groups


def test_the_table_is_of_these_mutants() -> None:
    text = mutate.TABLE.read_text(encoding="utf-8")
    missing = [m.name for m in load() if f"| {m.name} | {m.file} |" not in text]
    assert not missing and "LIVES" not in text


def test_a_mutant_without_its_place() -> None:
    with pytest.raises(ValueError, match="task2, 'x': task2/attention.py has no 'such text'"):
        Mutant("task2", "x", "task2/attention.py", "such text", "").applied("other")


MUTANTS = [
    Mutant("task1", "right", "task1/attention.py", "import torch", "import torch "),
    Mutant("task1", "wrong", "task1/attention.py", "dim=-1)", "dim=-2)", "causal"),
    Mutant("task1", "crash", "task1/attention.py", "P @ v", "__import__('os')._exit(3)"),
    Mutant("task1", "mistyped", "task1/attention.py", "P @ v", "P @ w"),
]


def test_what_becomes_of_mutants(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = mutate.examine_all(MUTANTS, "cpu", 2, 2, Console(width=300))
    right, wrong, crash, mistyped = outcomes
    assert wrong.killed and len(wrong.killers) == 2
    assert all(killer.startswith("causal_attention") for killer in wrong.killers)
    assert "passes all tests with --seed" in right.lives
    assert "the process ended with status 3" in crash.lives
    assert "name 'w' is not defined" in mistyped.lives  # a traceback is no check
    out = capsys.readouterr().out
    assert out.count("LIVES") == 3 and "'crash' LIVES" in out


def test_the_table_keeps_the_lines_of_other_mutants() -> None:
    first, second, *_ = load([1])
    before = mutate.table([Outcome(first, ["a-b-cpu"] * 3, "")], "", 20, "cpu")
    assert f"| {first.name} | {first.file} | a-b-cpu |" in before and "1 of 1 mutants" in before
    after = mutate.table([Outcome(second, ["a-b-cpu"], "passes")], before, 20, "cpu")
    assert f"| {first.name} | {first.file} | a-b-cpu |" in after and "1 of 2 mutants" in after
    assert f"| {second.name} | {second.file} | LIVES |" in after
    gone = after.replace(second.name, "a mutant that was removed")
    assert "removed" not in mutate.table([], gone, 20, "cpu")


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert mutate.main(["no such mutant"]) == 2
    assert "no mutant is named no such mutant" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        mutate.main(["--runs", "0"])


def test_the_reference_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert mutate.main(["--reference", "--stage", "1", "--runs", "2"]) == 0
    out = capsys.readouterr().out
    assert "task1: 2 runs of " in out and "cases, 0 failures" in out
