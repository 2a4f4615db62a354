"""Records that no run has written, and what make grade does with them."""

import copy
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from common import grade
from common.check.hints import answers
from common.paths import ROOT
from common.record import Record, Stage, edited, merge, render, verify, write_json
from common.record.points import WORTH
from common.record.provenance import content_hash, hashes
from common.record.record import digest
from common.record.shape import misfits
from common.record.verify import Stale, checked, problems, refused
from common.tests.test_grade import FORM, checkout, run  # noqa: F401
from common.timing import KEPT, Benchmark, Reference, Timing

CHIP = Reference(4000.0, 50.0, 800.0, 250.0)
RUNS = [2.0 + 0.01 * (i * 37 % 100) for i in range(200)]  # ms


def a_record(root: Path, stage: str = "task4", device: str = "cuda") -> dict[str, Any]:
    """What merge() makes of a run on a GPU with two benchmarks, as JSON."""
    about = Stage(stage, "a stage", WORTH[stage], (f"{stage}/attention.py",))
    record = Record(
        about, device="cpu", seed=1, complete=True, fields=["layer", "short"], root=root
    )
    record.device = device
    record.groups = [group("attention", 3, 3), group("layer", 2, 2)]
    record._reference = CHIP.as_record()
    shape = {"shape": "B4", "dtype": torch.float32, "flops": 4e10, "bytes": 2e9}
    for name, times in (("layer", RUNS), ("short", RUNS[:7])):
        slower = Timing.of([3 * t for t in times])
        found = Benchmark(name, ours=Timing.of(times), baselines={"SDPA": slower}, **shape)
        record.benchmarks[name] = found.as_record(CHIP)
    record.texts["generated text"] = "Once upon a time"
    record.finish()
    entry = record.as_json()
    if device == "cuda":
        gpu = {"gpu": "NVIDIA H200", "driver": "580", "cuda": "13.0"}
        entry["run"]["machine"] = entry["run"]["machine"] | gpu  # machine() keeps its own
    return json.loads(json.dumps(merge(None, entry)))


def group(name: str, passed: int, total: int) -> dict[str, Any]:
    status = "passed" if passed == total else "failed"
    return {"name": name, "passed": passed, "total": total, "seconds": 1.0, "status": status}


def seal(entry: dict[str, Any]) -> dict[str, Any]:
    """As a determined student would."""
    return entry | {"digest": digest(entry)}


def test_a_record_that_was_written_by_a_run_has_no_problems(tmp_path: Path) -> None:
    entry = a_record(tmp_path)
    assert problems(entry, "task4", "cuda", Stale(tmp_path)) == []
    assert refused({"cuda": {"device": "cuda", "stages": {"task4": entry}}}, tmp_path) == []


def test_the_records_of_the_course_have_none() -> None:
    for device in ("cpu", "cuda"):
        content = json.loads((ROOT / f"common/records/{device}.json").read_text())
        assert checked(content, device, Stale()) == {}


# What a record carries ---------------------------------------------------------------------------


def test_samples_give_the_statistics_again() -> None:
    few, many = Timing.of(RUNS[:7]), Timing.of(RUNS)
    assert list(few.samples_ms) == sorted(RUNS[:7]) and len(many.samples_ms) == KEPT
    for found in (few, many, many.per(100)):
        again = Timing.of(found.samples_ms)
        for name in ("median_ms", "p10_ms", "p90_ms"):
            assert getattr(again, name) == pytest.approx(getattr(found, name), rel=1e-5)
        assert max(len(str(sample)) for sample in found.samples_ms) < 12


def test_a_list_of_numbers_takes_one_line(tmp_path: Path) -> None:
    content = {"a": [1, 2.5e-3], "b": ["[\n1,\n2]", []], "c": [{"d": [3]}]}
    write_json(tmp_path / "a.json", content)
    text = (tmp_path / "a.json").read_text()
    assert '"a": [1, 0.0025]' in text and '"d": [3]' in text and json.loads(text) == content


def test_hashes_follow_tests_common_and_answers(tmp_path: Path) -> None:
    def write(path: str, text: str) -> dict[str, str]:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(text.encode())
        return hashes("task2", ["task2/attention_kernel.cu"], tmp_path)

    first = write("task2/test.py", "a\nb\n")
    assert write("task2/test.py", "a\r\nb\r\n") == first
    for path in (
        "common/records/cpu.json",
        "common/README.md",
        "common/tests/test_a.py",
        "task2/a.py",
    ):
        assert write(path, "x") == first, path
    assert write("common/.cache/a.py", "x") == write("common/staff/a.py", "x") == first

    def changed(path: str) -> set[str]:
        before = hashes("task2", ["task2/attention_kernel.cu"], tmp_path)
        after = write(path, "y")
        return {name for name in before if before[name] != after[name]}

    assert changed("task2/test.py") == {"tests"}
    assert changed("task2/attention_kernel.cu") == {"answers"}
    for path in ("common/check/a.py", "common/include/a.cuh", "common/record/points.toml"):
        assert changed(path) == {"common"}, path


def test_a_stage_knows_the_files_with_answers() -> None:
    assert sorted(answers("task5")) == ["task5/attention.py", "task5/attention_kernel.cu"]
    assert answers("task7") == []
    assert content_hash({"a": b"1", "b": b"2"}) == content_hash({"b": b"2", "a": b"1"})


# What does not follow ----------------------------------------------------------------------------

Change = Callable[[dict[str, Any]], object]
LAYER = "benchmarks.layer"


def put(path: str, value: object) -> Change:
    """Put a value at a path such as ``groups.0.passed``."""

    def change(entry: dict[str, Any]) -> None:
        *above, last = (int(part) if part.isdigit() else part for part in path.split("."))
        at: Any = entry
        for part in above:
            at = at[part]
        at[last] = value

    return change


CHANGES = [
    (put("groups.0.passed", 1027), "attention: 1027 of 3 checks passed"),
    (put("groups.0.passed", 2), "attention: 2 of 3 checks passed, and it is called passed"),
    (put("groups.0.status", "perfect"), "attention: 'perfect' is no status"),
    (put("groups.1.name", "attention"), "two groups of checks have the same name"),
    (put("groups.0", group("attention", 2, 3)), "its groups of checks earn 2 points, and not 4"),
    (put("groups.0", group("attention", 2, 3)), "it is called passed; its groups of checks say failed"),
    (put("earned", 47), "47 of 4 points"),
    (put("points", 20), "it is worth 4 points, and not 20"),
    (put("complete", False), "it is from a run of some checks alone"),
    (put("stage", "task3"), "it is a record of task3, kept as one of task4"),
    (put("device", "cpu"), "it is a record of cpu, kept as one of cuda"),
    (put(f"{LAYER}.ours.median_ms", 2.4), "layer, ours: 2.4 ms (2.099-2.891) does not follow from its samples"),
    (put(f"{LAYER}.ours.p90_ms", 2.3), "is no time"),
    (put(f"{LAYER}.ours.n", 3), "of 3 runs 3 samples are kept, in order; it has 51"),
    (put(f"{LAYER}.baselines.SDPA.median_ms", 8.5), "layer, SDPA: 8.5 ms"),
    (put(f"{LAYER}.speedups.SDPA", 30.0), "layer: 30x SDPA, but the times give 3x"),
    (put(f"{LAYER}.speedups", {}), "layer: its speedups are not those of its baselines"),
    (put(f"{LAYER}.tflops.rate", 49.0), "layer: 49 TFLOP/s, but flops and time give 16.03"),
    (put(f"{LAYER}.flops", None), "layer: TFLOP/s without flops"),
    (put(f"{LAYER}.gb_per_s.share", 2.0), "layer: 200% of what this GPU reaches"),
    (put("reference.bf16_tflops", 10.0), ""),  # float32's own product is above the rate
    (put("reference", dict.fromkeys(CHIP.as_record(), 10.0)), "layer: 16.03 TFLOP/s, and this GPU reaches 10"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "said"), CHANGES, ids=[str(n) for n in range(len(CHANGES))])
def test_figures_that_do_not_follow(tmp_path: Path, change: Change, said: str) -> None:
    entry = a_record(tmp_path)
    change(entry)
    assert (
        problems(entry, "task4", "cuda", Stale(tmp_path))[0] == "it was edited after it was written"
    )
    found = problems(seal(entry), "task4", "cuda", Stale(tmp_path))
    assert any(said in sentence for sentence in found) if said else not found, found


def test_samples_and_digest_cannot_simply_go(tmp_path: Path, monkeypatch: Any) -> None:
    entry = a_record(tmp_path)
    del entry["benchmarks"]["layer"]["ours"]["samples_ms"]
    assert problems(seal(entry), "task4", "cuda", Stale(tmp_path)) == [
        "layer, ours: it has no samples"
    ]
    entry = a_record(tmp_path)
    del entry["digest"]
    without = "it has no digest, as every record that was not edited has"
    assert problems(entry, "task4", "cuda", Stale(tmp_path)) == [without]
    entry = a_record(tmp_path, "task1", "cpu") | {"benchmarks": {}, "texts": {}}
    del entry["digest"], entry["run"]["hashes"]  # as records of before they had any
    assert problems(entry, "task1", "cpu", Stale(tmp_path)) == []
    monkeypatch.setattr(verify, "STRICT", True)  # as in a student edition
    assert problems(entry, "task1", "cpu", Stale(tmp_path)) == [without]


def test_many_problems_are_counted(tmp_path: Path) -> None:
    entry = a_record(tmp_path)
    entry["groups"] = [group(f"g{n}", 5, 3) for n in range(20)]
    found = problems(entry, "task4", "cuda", Stale(tmp_path))
    assert len(found) == verify.SHOWN + 1 and found[-1].startswith("and ")


# Absurd fields -----------------------------------------------------------------------------------

ABSURD = [
    None, True, "", "-1", "\ud800", "x" * 200_000, -1, -0.5, 0, 1e308, math.nan, math.inf, -math.inf, 10**300, 5e-324,
    [], {}, [[]], {"": {}}, [None], {"a" * 5000: 1}, "../../etc/*", ["/**/*"],
]  # fmt: skip


def _paths(found: Any, above: tuple = ()) -> list[tuple]:
    inner = (
        found.items()
        if isinstance(found, dict)
        else enumerate(found)
        if isinstance(found, list)
        else ()
    )
    return [above, *(path for key, value in inner for path in _paths(value, (*above, key)))]


def test_absurd_fields_give_sentences_and_never_an_error(tmp_path: Path) -> None:
    """Each place of a record in turn gets each absurd value, and is left out; then several at a time."""
    whole = {"device": "cuda", "stages": {"task4": a_record(tmp_path)}}
    rng, stale, silent = random.Random(7), Stale(tmp_path), []
    places = _paths(whole)[1:]
    for number in range(3000):
        content = copy.deepcopy(whole)
        few = [places[number % len(places)]] if number < 2000 else rng.sample(places, 4)
        for *above, last in few:
            at = content
            try:
                for key in above:
                    at = at[key]
                if rng.random() < 0.1:
                    del at[last]
                else:
                    at[last] = rng.choice(ABSURD)
            except (TypeError, KeyError, IndexError):
                pass  # an earlier value took its place away
        found = checked(content, "cuda", stale)
        sentences = [sentence for sentences in found.values() for sentence in sentences]
        assert all(s.isprintable() and len(s) < 400 for s in sentences)
        if content != whole and not sentences and "task4" in content["stages"]:
            silent.append(few)
        if not sentences:  # then it can be rendered, and written
            render(FORM, {"cuda": content}, tmp_path).encode()
    assert not silent


@pytest.mark.parametrize(
    "content", [None, [], "x", 3, {}, {"stages": []}, {"stages": {"task1": []}}]
)
def test_a_file_that_is_no_record(content: object, tmp_path: Path) -> None:
    assert checked(content, "cpu", Stale(tmp_path))
    assert refused({"cpu": content}, tmp_path)[0].startswith("common/records/cpu.json")


def test_a_pattern_stays_in_the_checkout(tmp_path: Path) -> None:
    for pattern in (
        "/etc/passwd",
        "../x",
        "task1/../../x",
        "common/**/*",
        "**",
        "task1/" + "a" * 200,
    ):
        entry = a_record(tmp_path)
        entry["run"]["sources"]["patterns"] = [pattern]
        assert any("paths in tasks or in common/" in said for said in misfits(entry)), pattern


# make grade --------------------------------------------------------------------------------------


@pytest.fixture
def graded(checkout: Path) -> Path:  # noqa: F811
    """A checkout in which one stage was graded; a second run would write the same."""
    folder = checkout / "task1"
    folder.mkdir()
    (folder / "attention.py").write_text("answer = 42\n")
    entry = a_record(checkout, "task1", "cpu")
    entry = {k: v for k, v in entry.items() if k != "digest"} | {"benchmarks": {}, "texts": {}}
    (folder / "test.py").write_text(
        "import pathlib, sys\n"
        "file = pathlib.Path(sys.argv[sys.argv.index('--record') + 1])\n"
        f"file.write_text({json.dumps(entry)!r})\n"
    )
    assert run("--stage", "1") == 0
    return checkout


def test_an_edited_record_is_refused_before_anything_runs(graded: Path, capsys: Any) -> None:
    file = graded / "common/records/cpu.json"
    before = file.read_text()
    file.write_text(before.replace('"seconds": 1.0', '"seconds": 0.5', 1))
    edit, form = file.read_text(), (graded / "Results.md").read_text()
    assert run("--stage", "1") == 2
    said = capsys.readouterr().err
    assert said == (
        "common/records/cpu.json, task1: it was edited after it was written; restore it (git checkout"
        " common/records/cpu.json), or delete it, and its stages are graded anew. Nothing was written; correct that"
        " and run again.\n"
    )
    assert (file.read_text(), (graded / "Results.md").read_text()) == (edit, form)
    file.unlink()
    assert run("--stage", "1") == 0


def test_a_damaged_record_of_any_kind_is_a_sentence(graded: Path, capsys: Any) -> None:
    file = graded / "common/records/cpu.json"
    for damage in (b"\xff", b"[" * 100_000, b"", b'{"a": 1' + b"0" * 5000 + b"}", b"[]"):
        file.write_bytes(damage)
        assert run("--stage", "1") == 2
        said = capsys.readouterr().err
        assert said.startswith("common/records/cpu.json") and said.count("\n") == 1


def test_edited_lines_of_the_form_are_noticed_and_written_anew(graded: Path, capsys: Any) -> None:
    form = graded / "Results.md"
    whole = form.read_text()
    assert not edited(whole) and edited(FORM)
    form.write_text(whole.replace("2 of 2", "20 of 2").replace("Name: Ada", "Name: Eve"))
    capsys.readouterr()
    assert run("--stage", "1") == 0
    assert "Results.md was edited between its markers" in capsys.readouterr().out
    assert form.read_text() == whole.replace("Name: Ada", "Name: Eve")
    form.write_bytes(form.read_bytes().replace(b"\n", b"  \r\n"))  # an editor's line ends
    assert run("--stage", "1") == 0
    assert "was edited" not in capsys.readouterr().out


def test_a_record_of_other_checks_is_stale_for_students(graded: Path, monkeypatch: Any) -> None:
    records = {"cpu": json.loads((graded / "common/records/cpu.json").read_text())}
    entry = records["cpu"]["stages"]["task1"]
    entry["run"]["hashes"] = hashes("task1", (), graded)
    records["cpu"]["stages"]["task1"] = seal(entry)
    monkeypatch.setattr(verify, "STRICT", True)
    assert "| task1 | 5 of 5 | not run | 2 of 2 |" in render(FORM, records, graded)
    (graded / "common/check").mkdir()
    (graded / "common/check/compare.py").write_text("tolerance = 1e9")
    line = "| task1 | 5 of 5, **stale**: common/ changed since | not run | - of 2 |"
    assert line in render(FORM, records, graded)
    assert refused(records, graded) == []
    (graded / "common/check/compare.py").unlink()
    (graded / "task1/test.py").write_text("pass")
    assert "**stale**: checks changed since" in render(FORM, records, graded)
    monkeypatch.setattr(verify, "STRICT", False)
    assert "stale" not in render(FORM, records, graded)


def test_points_may_change_while_records_are_kept(tmp_path: Path, monkeypatch: Any) -> None:
    entry = a_record(tmp_path)
    (tmp_path / "common").mkdir()
    (tmp_path / "common/points.toml").write_text("")  # another common/, and so other points
    monkeypatch.setitem(verify.WORTH, "task4", WORTH["task1"])
    assert problems(entry, "task4", "cuda", Stale(tmp_path)) == []
    (tmp_path / "common/points.toml").unlink()
    assert "it is worth 2 points" in problems(entry, "task4", "cuda", Stale(tmp_path))[0]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_compiler_that_does_not_work_leaves_the_records(
    graded: Path, device: str, monkeypatch: Any, capsys: Any
) -> None:
    (graded / "task1/compile.py").write_text("import sys; sys.exit(1)")
    before = {p: p.read_bytes() for p in graded.rglob("*.*") if p.suffix in (".json", ".md")}

    def broken(sources: list[Path], on: str) -> None:
        assert sources[0].suffix == ".cu" and on == device
        raise grade.BuildError("cc1plus: fatal error: no such file")

    monkeypatch.setattr(grade.builder, "build", broken)
    monkeypatch.setattr(grade.toolchain, "find_gpu", lambda: None)
    monkeypatch.setattr(grade.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(grade.torch.cuda, "get_device_name", lambda: "a GPU")
    assert grade.main(["--device", device, "--stage", "1"]) == 2
    said = capsys.readouterr().err
    assert (
        said.startswith("task1 does not build: cc1plus: fatal error")
        and "Nothing was written" in said
    )
    assert before == {p: p.read_bytes() for p in before}
