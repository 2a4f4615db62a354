"""The record, and what is rendered from it."""

import pytest

from common.record.grid import Grid
from task5.ladder import plot, record, table
from task5.ladder.benchmark import CURVES, OURS
from task5.ladder.fakes import CUDNN, LARGE, SHORT, at, run, times
from task5.ladder.record import Record, Tables
from task5.ladder.rungs import FOLDER, RUNGS


def test_a_run_replaces_its_part_of_the_record(ladder):
    found = Tables(run(), [Grid("speed", ["", "ratio"], [["x", "0.98 !"]], [False])])
    record.save(times=times(), bars=found)
    record.save(steps=found)
    again = times({LARGE: at({OURS: 125}, XQA="not here")})
    record.save(times=again)
    assert record.load() == Record(again, found, steps=found)
    assert again.microseconds(LARGE, OURS) == 125 and again.microseconds(LARGE, CUDNN) is None
    assert again.floor(LARGE) == pytest.approx(122.6, abs=0.1)


def test_results_are_filled_in_between_the_markers_only(ladder):
    found = Tables(run("2026-03-03"), [Grid("speed", ["", "ratio"], [["x", "0.98 !"]], [False])])
    full = Record(times(), bars=found)
    full.times.shapes[LARGE.key].left_out["FlashInfer"] = "no such shape"
    (ladder / "decode.png").touch()
    table.write(full)
    text = (ladder / "RESULTS.md").read_text()
    assert text.startswith("mine\n") and text.endswith("\nmine\n")
    assert "A pure read in the same run: 4,380 GB/s." in text and "(decode.png)" in text
    assert "0 of 1 bars met" in text and text.count("Not measured yet") == 3
    assert "2026-01-01" in text and "2026-03-03" in text and "FlashInfer: 0.6.13" in text
    assert f"- FlashInfer, {LARGE.key}: no such shape" in text
    assert f"- [{RUNGS[0].label}]({RUNGS[0].file}): {RUNGS[0].title}" in text
    row = next(x for x in text.splitlines() if x.startswith(f"| {LARGE.key} | 123 "))
    assert "| 131 | 130 to 133 | 4,083 | 93% |" in row
    assert table.STALE not in text
    readme = (ladder / "README.md").read_text()
    assert readme.startswith("mine\n") and readme.endswith("\nmine\n")
    assert f"| [{RUNGS[0].label}]({RUNGS[0].file}) | {RUNGS[0].title} | " in readme
    call, library = (
        next(x for x in readme.splitlines() if x.startswith(f"| {name} | "))
        for name in ("**a call**", f"*{CUDNN}*")
    )
    assert call.endswith(" | 131 (93 %, 1.12 x) |") and library.endswith(" | 148 (83 %) |")
    assert "| 8 | 4 + ½ | 4 + ½ |" in readme  # of a call's choices
    table.write(full)
    assert text == (ladder / "RESULTS.md").read_text()
    full.times.run["sources"]["sha256"] = "0"
    assert all(table.STALE in text for text in table.rendered(full).values())
    (ladder / "RESULTS.md").write_text("nothing")
    with pytest.raises(
        ValueError, match="RESULTS.md: the marker <!-- ladder: times --> is missing"
    ):
        table.write(full)


def test_why_sides_are_missing():
    full = "full at /a/b-1/c.h:49: 1 / 2"
    found = times({LARGE: at({}, XQA="gone"), SHORT: at({}, XQA="gone", FA3="old", cuDNN=full)})
    assert table.reasons(found) == [
        f"FA3, {SHORT.key}: old",
        "XQA, 2 shapes: gone",
        f"cuDNN, {SHORT.key}: full at c.h:49: 1 / 2",
    ]


def test_the_committed_results_are_what_is_rendered_from_the_record():
    """All but whether the kernels have changed since, which table.json does not say."""

    def lines(text):
        return [line for line in text.splitlines() if line not in (table.STALE, "")]

    for name, text in table.rendered(record.load()).items():
        assert lines((FOLDER / name).read_text("utf-8")) == lines(text), (
            f"task5/ladder/{name} is not as table.json has it: python -m task5.ladder --render"
        )


def test_the_picture(ladder):
    pytest.importorskip("matplotlib")
    full = times()
    assert plot.draw(full).stat().st_size > 10_000
    for shape in CURVES[16]:
        del full.shapes[shape.key]
    assert plot.draw(full) is None
