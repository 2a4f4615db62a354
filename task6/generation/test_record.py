"""The record, its text and its picture."""

import pytest

from common.record.grid import Grid
from task6.generation import peers, plot, record, table
from task6.generation.bars import COURSE
from task6.generation.benchmark import OURS
from task6.generation.breakdown import GAPS
from task6.generation.fakes import READ, facts, made_up, times
from task6.generation.record import Record, Tables, Times


def test_the_record_is_read_as_it_was_written(folder):
    tokens = Tables(facts(), [Grid("10 tokens", ["", "found"], [["x", "1"]], [True])])
    shared = Times(facts(), READ, [made_up(COURSE, 84.0, 3.3), made_up(COURSE, 60.0, 2.0, 2)])
    graded = Tables(facts(), [Grid("products", ["", "x PyTorch"], [["x", "3.10"]], [True])])
    full = Record(times(), {"2": shared}, tokens, graded)
    record.save(full)
    again = record.load()
    for a, b in zip(again.bars.found, full.bars.found, strict=True):
        assert a.case == b.case and a.parts == b.parts and a.same == b.same
        assert a.ours.between.median_ms == b.ours.between.median_ms
        assert a.ours.p99_ms == b.ours.p99_ms
    assert (
        again.shared["2"].found[1].world == 2 and again.tokens == tokens and again.graded == graded
    )
    record.save(again)
    assert record.load() == again


def test_results_are_filled_in_between_the_markers_only(folder):
    table.write(Record())
    assert (folder / "RESULTS.md").read_text().count("Not measured yet") == 6
    full = Record(times("2026-03-03"))
    (folder / "step.png").touch()
    table.write(full)
    text = (folder / "RESULTS.md").read_text()
    assert text.startswith("mine\n") and text.endswith("\nmine\n") and "(step.png)" in text
    assert "6 of 13 bars met" in text and text.count("Not measured yet") == 3
    assert "A pure read in the same run: 4,000 GB/s." in text and "2026-03-03" in text
    assert f"| {OURS} | 84 | 3.3 | " in text and "| floor |  | 3.25 |" in text
    assert f"- {COURSE}: {peers.LLAMA}: out of memory" in text
    assert "allocated 9.6 GiB (1.030 x), reserved 9.9 GiB (1.060 x)" in text
    assert "| o | tensor_core_kernel | 24 | 37.50 | 900.0 | 96.8% | 3,000 | 83% |" in text
    assert "| o |  | 24 | 33.33 | 800.0 | 99.4% | 3,000 | 94% |" in text
    assert "a step in one launch of 805 us" in text and table.STALE not in text
    graphs = (folder / "GRAPHS.md").read_text()
    assert graphs.startswith("mine\n") and graphs.endswith("\nmine\n") and "2026-03-03" in graphs
    assert f"| {COURSE} | 9.9 (33%) | 3.3 (98%) | 3.25 |" in graphs
    assert "| o | 24 | 3,000 | 37.50 | 83% | 33.33 | 94% |" in graphs and GAPS not in graphs
    full.bars.run["sources"]["sha256"] = "0"
    assert all(table.STALE in text for text in table.rendered(full).values())
    full.graded = Tables(
        facts("2026-04-04"), [Grid("products", ["", "x"], [["a", "3.10"]], [True])]
    )
    text = table.rendered(full)["RESULTS.md"]
    assert "| a | 3.10 |" in text and "2026-04-04" in text and text.count("Not measured yet") == 2
    full.graded.run["sources"]["sha256"] = "0"
    assert table.STALE_PRODUCTS in table.rendered(full)["RESULTS.md"]


def test_the_committed_results_are_what_is_rendered_from_the_record():
    """All but whether the decoder has changed since, which table.json does not say."""

    def lines(text):
        return [
            line
            for line in text.splitlines()
            if line not in (table.STALE, table.STALE_PRODUCTS, "")
        ]

    for name, text in table.rendered(record.load()).items():
        assert lines((record.FOLDER / name).read_text("utf-8")) == lines(text), (
            f"task6/generation/{name} is not as table.json has it: python -m task6.generation --render"
        )


def test_the_picture(folder):
    pytest.importorskip("matplotlib")
    full = times()
    assert plot.draw(full).stat().st_size > 10_000
    assert [part.name for part in plot._drawn(full.found[0].parts)] == ["o", GAPS, "1 others"]
    for found in full.found:
        found.parts = []
    assert plot.draw(full)
    for found in full.found:
        found.one_launch = []
    assert plot.draw(full) is None
