"""The report for the class: distributions, failures that are alike, and a leaderboard of those who asked for it."""

import sys

import pytest
from rich.console import Console

from common.staff.grade import leaderboard, report, run

POINTS = {"task1": 2.0, "task4": 4.0}


def failed(*texts):
    return {"earned": 0, "status": "failed", "reason": "", "groups": [{"failures": list(texts)}]}


def passed(stage, **ratios):
    speed = {
        name: {"ratio": r, "ours_ms": 3 / r, "reference_ms": 3.0} for name, r in ratios.items()
    }
    all_right = {"earned": POINTS[stage], "status": "passed", "reason": "", "groups": []}
    return all_right | ({"speed": speed} if speed else {})


def result(name, shown="", **stages):
    stages = {s: {"points": POINTS[s]} | stages.get(s, passed(s)) for s in POINTS}
    total = sum(stage["earned"] for stage in stages.values())
    return {"name": name, "total": total, "stages": stages, "remarks": [], "failed": False} | {
        "key": "k",
        "leaderboard": shown,
    }


def unread(name, remark):
    return {"name": name, "total": 0, "stages": {}, "remarks": [remark], "failed": True}


SCALE = (
    "attention, case 'ragged' on cpu\n    no size is even (batch={n})\n    largest error 0.{n}, allowed 3.2e-06\n"
    "    usually: the scale is 1 / head_dim: that mistake gives exactly these numbers\n    again: python"
)


def test_points_and_quartiles():
    results = [result(f"s{n}") for n in range(3)] + [
        result("zero", task1=failed("x"), task4=failed("y"))
    ]
    text = report.report(results)
    assert "| task1 | 2 | 1.5 | 2 | 2 | 3 | 1 |" in text
    assert "| total | 6 | 4.5 | 6 | 6 | 3 | 1 |" in text


def test_the_same_mistake_is_one_failure():
    results = [
        result(f"student{n}", task1=failed(SCALE.format(n=n), SCALE.format(n=n + 5)))
        for n in (1, 2, 3)
    ]
    results.append(result("other", task1=failed("a.py: it is not written yet")))
    found = report.clusters(results)
    assert [(c.stage, c.mistake, c.submissions) for c in found] == [
        ("task1", "the scale is 1 / head_dim", 3),
        ("task1", "a.py: it is not written yet", 1),
    ]
    text = report.report(results)
    assert "- 3 submissions: `the scale is 1 / head_dim`" in text and "largest error 0.1" in text
    assert "student" not in text and "other" not in text


@pytest.mark.parametrize(
    ("texts", "mistake"),
    [
        (
            (
                "a, case 'b' on cpu\n    why\n    did not end within 30 s, and was ended",
                "a, case 'c' on cpu\n    why\n    did not end within 1.5 s, and was ended",
            ),
            "did not end within # s, and was ended",
        ),
        (
            (
                "a, case 'b' on cpu\n    why\n    Traceback (most recent call last):\n      File \"/x/y.py\", line 3, in f\n"
                "        boom\n    IndexError: index 7 of 0x7f3a\n    again: python",
                "a, case 'b' on cpu\n    why\n    Traceback (most recent call last):\n      File \"/z.py\", line 9, in f\n"
                "    IndexError: index -12 of 0x11",
            ),
            "IndexError: index # of #",
        ),
        (
            (
                "/tmp/grade-1/task2/attention_kernel.cu:17:4: error: 'x' was not declared",
                "In function f:\n/tmp/grade-2/task2/attention_kernel.cu:9:1: error: 'x' was not declared",
            ),
            "attention_kernel.cu: error: 'x' was not declared",
        ),
        (("task2/attention_kernel.cu is missing",), "attention_kernel.cu is missing"),
        (("",), ""),
    ],
)  # fmt: skip
def test_numbers_and_places_make_no_difference(texts, mistake):
    assert {report.mistake(text) for text in texts} == {mistake}


def test_what_follows_from_another_failure_is_none():
    texts = (
        "a, case 'b' on cpu\n    why\n    it has ended",
        "a, case 'c' on cpu\n    why\n    not run: ended",
    )
    assert [c.mistake for c in report.clusters([result("x", task1=failed(*texts))])] == [
        "it has ended"
    ]


def test_unwritten_stages_are_no_failures():
    nothing = {"earned": 0, "status": "not run", "reason": "task1 is not written", "groups": []}
    broken = nothing | {"reason": "task1/attention.py:8: BEGIN SOLUTION without END SOLUTION"}
    assert report.clusters([result("x", task1=nothing)]) == []
    assert len(report.clusters([result("x", task1=broken)])) == 1


def test_what_was_not_graded_is_counted_apart():
    results = [
        result("x"),
        unread("y", "it is 12 bytes too long"),
        unread("z", "it is 7 bytes too long"),
    ]
    text = report.report(results)
    assert "- 2 submissions: `it is # bytes too long`" in text
    assert "Of the 1 submission that" in text and "| task1 | 2 | 2 | 2 | 2 | 1 | 0 |" in text
    assert "No submission was graded." in report.report(results[1:])


def test_text_of_students_is_no_markdown():
    text = report.report([result("x", task1=failed("<b>`[x](http://y)`\u202e\x1b[1m"))])
    assert "`<b>'[x](http://y)'" in text and "\u202e" not in text and "\x1b" not in text


def test_only_who_takes_part_and_passes_is_ranked():
    results = [
        result("a", "Fast", task4=passed("task4", plain=2.0, causal=8.0)),
        result("b", "Slow", task4=passed("task4", plain=1.0, causal=1.0)),
        result("c", "", task4=passed("task4", plain=9.0, causal=9.0)),
        result("d", "Wrong", task4=passed("task4", plain=9.0, causal=9.0) | {"status": "failed"}),
        result("e", "Half", task4=passed("task4", plain=9.0)),
        result("f", "Broken", task4=passed("task4", plain=float("nan"), causal=float("inf"))),
        result("g", "Level", task4=passed("task4", plain=1.0, causal=1.0)),
    ]
    rows = leaderboard.ranking(results, "task4")
    assert [(row.place, row.name) for row in rows] == [(1, "Fast"), (2, "Level"), (2, "Slow")]
    assert rows[0].ratio == pytest.approx(4) and rows[0].milliseconds == {
        "plain": 1.5,
        "causal": 0.375,
    }
    text = report.report(results)
    assert "| 1 | `Fast` | 4.00x | 0.375 | 1.5 |" in text
    for name in ("Wrong", "Half", "Broken"):
        assert name not in text


def test_without_a_speed_there_is_no_ranking():
    assert "None: no speed was measured" in report.report([result("a", "Ada")])


def test_two_of_one_name():
    times = [result(f"s{n}", "Ada", task4=passed("task4", plain=4.0 - n)) for n in range(2)]
    times.append(result("s2", "ada (2)", task4=passed("task4", plain=9.0)))
    names = [row.name for row in leaderboard.ranking(times, "task4")]
    assert names == ["ada (2)", "Ada", "Ada (3)"]


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"", ""),
        (b"# a comment\n\n  \n", ""),
        (b"# a comment\r\nAda  Lovelace \r\nsecond\r\n", "Ada Lovelace"),
        ("\ufeffZoë 你好".encode(), "Zoë 你好"),
        (b"=cmd|'x'!A0", "cmd'x'!A0"),
        (b"-+@Ada", "Ada"),
        (b"`<b>`|x\\", "bx"),
        ("Ada\u202eevil\u200b\x1b[0m\x00".encode(), "Adaevil[0m"),
        (b"x" * 500, "x" * 30),
        (("Z" + "\u0321" * 9).encode(), "Z\u0321\u0321"),
        (b"\xff\xfe A\xffda", "Ada"),
        (b"\x00" * 100, ""),
    ],
)
def test_a_name_is_made_harmless(data, name):
    assert leaderboard.chosen_name(data) == name


def test_the_edition_takes_nobody_part():
    from common.paths import ROOT

    text = (ROOT / "common/staff/edition" / leaderboard.FILE).read_bytes()
    assert len(text) > 100 and leaderboard.chosen_name(text) == ""
    assert str(leaderboard.LENGTH).encode() in text


def test_without_matplotlib_the_page_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    (tmp_path / "report.png").write_bytes(b"of an earlier run")
    run._write_report([result("x")], tmp_path, Console())
    assert "no report.png: matplotlib is not installed" in capsys.readouterr().out
    assert "report.png" not in (tmp_path / "report.md").read_text()
    assert not (tmp_path / "report.png").exists()


@pytest.mark.parametrize("count", [1, 40])
def test_the_picture(tmp_path, count):
    pytest.importorskip("matplotlib")
    bad = failed(SCALE.format(n=1), "Error: $x_1 \N{SNOWMAN} " + "long " * 50)
    results = [result(f"s{n}", task1=bad if n % 2 else passed("task1")) for n in range(count)]
    run._write_report(results, tmp_path, Console())
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert "](report.png)" in (tmp_path / "report.md").read_text()


def test_no_picture_of_nothing(tmp_path):
    run._write_report([unread("y", "it is no zip")], tmp_path, Console())
    assert (
        not (tmp_path / "report.png").exists()
        and "it is no zip" in (tmp_path / "report.md").read_text()
    )
