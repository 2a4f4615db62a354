"""Questions about a submission's own code: what is asked, and that the answers are computed."""

import re
import shutil
import sys
from contextlib import nullcontext

import pytest
from rich.console import Console

from common import regions
from common.paths import ROOT
from common.staff import student_edition
from common.staff.grade import __main__ as grade
from common.staff.grade import one, run, source
from common.staff.grade.course import course
from common.staff.grade.submission import Submission
from common.staff.judge import sandbox
from common.staff.student_edition import restore
from common.staff.viva import changes, figures, launches, page, probe
from common.staff.viva.lab import Written
from common.staff.viva.questions import Candidate, Question

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
needs_sandbox = pytest.mark.skipif(bool(sandbox.missing()), reason="no namespaces here")
CU = "task2/attention_kernel.cu"
KINDS = [
    "barrier",
    "guard",
    "maximum",
    "statement",
    "conflicts",
    "occupancy",
    "tiles",
    "measured",
    "splits",
]


# What can be taken away ---------------------------------------------------------------------------------


def region_of(lines, name="kernel.cu"):
    """A file of one region with these lines, and its changes by line."""
    text = "# BEGIN\n" + "".join(f"{line}\n" for line in lines) + "# END\n"
    region = regions.Region("f", 1, len(lines) + 2, "", "", "")
    find = changes.python_changes if name.endswith(".py") else changes.cuda_changes
    found = list(find(text, region))
    for change in found:
        assert change.text.count("\n") == text.count("\n")
    return {
        change.line - 1: (change.kind, change.text.split("\n")[change.line - 1]) for change in found
    }


@pytest.mark.parametrize(
    ("line", "kind", "new"),
    [
        ("  __syncthreads();  // complete", "barrier", "  ;"),
        ("cp_async_wait<1>();", "barrier", ";"),
        ("m = fmaxf(m, x[i]);", "maximum", ";"),
        ("for (int i = t; i < n; ++i) m = fmaxf(m, x[i]);", "maximum", ";"),
        ("S[r][c] += a.x * b.x;", "statement", ";"),
        ("next.template store<tiles.K_row>(K_j);", "statement", ";"),
        ("load_tile<B_r, D>(Q_i, q, (first + r) * 4);", "statement", ";"),
        ("if (row < M && f(col) < N) C(row, col) = sum;", "guard", "if (true) C(row, col) = sum;"),
        ("if (pos >= n) return;", "guard", "if (false) return;"),
        ("if (i < n) {", "guard", "if (true) {"),
        ("x[i] = row < M && k < K ? A(row, k) : 0.0f;", "guard", "x[i] = true ? A(row, k) : 0.0f;"),
    ],
)
def test_what_can_be_taken_from_a_kernel(line, kind, new):
    assert region_of([line]) == {1: (kind, new)}


@pytest.mark.parametrize(
    "line",
    [
        "float sum = 0.0f;",
        "const int row = a + b;",
        "// __syncthreads();",
        "/* __syncthreads(); */",
        'printf("__syncthreads();"',
        "for (int k = 0; k < K; ++k) {",
        "}",
        "#pragma unroll",
        "return;",
        "if (causal) x = 1;",
    ],
)
def test_what_cannot(line):
    found = region_of([line])
    assert not found or line.startswith("if")  # an `if` without a comparison: the whole line may go
    assert all(kind != "guard" for kind, _ in found.values())


def test_a_statement_of_several_lines_stays():
    assert region_of(["x = f(a,", "      b);", "y = 1;"]) == {3: ("statement", ";")}


def test_what_can_be_taken_from_python():
    found = region_of(
        [
            "def f(q, o):",
            "    s = q",
            "    s = s * 2",
            "    o[0] = torch.maximum(s, q)",
            "    s += 1",
            "    return s",
        ],
        "attention.py",
    )
    assert found == {
        3: ("statement", "    pass"),
        4: ("maximum", "    pass"),
        5: ("statement", "    pass"),
    }
    assert region_of(["def f(:"], "attention.py") == {}


# Which questions ----------------------------------------------------------------------------------------


def candidates(kinds=6, stages=3):
    def compute(kind, stage):
        return Question(
            f"k{kind}", f"task{stage}", "f", 10 * kind + stage, "", "", f"{kind} {stage}"
        )

    return [
        Candidate(
            f"k{kind}", f"task{stage}", "", lambda kind=kind, stage=stage: compute(kind, stage)
        )
        for kind in range(kinds)
        for stage in range(stages)
    ]


def test_the_choice_is_the_seeds_and_spreads():
    first = list(probe.choose(candidates(), 6, "ann 1"))
    assert first == list(probe.choose(candidates(), 6, "ann 1"))
    assert first != list(probe.choose(candidates(), 6, "bob 1"))
    assert len({question.kind for question in first}) == 6
    assert {sum(q.stage == f"task{n}" for q in first) for n in range(3)} == {2}
    assert len(list(probe.choose(candidates(2, 2), 9, "ann 1"))) == 4


def test_what_has_no_answer_or_the_same_one_is_not_asked():
    nothing = Candidate("k0", "task1", "", lambda: None)
    same = candidates(1, 1) * 3
    assert len(list(probe.choose([nothing, *same], 3, "ann"))) == 1
    assert list(probe.choose([nothing] * 100, 3, "ann")) == []


def test_of_a_function_that_fails_only_that_is_asked():
    fails = Question("failure", "task0", "f", 1, "", "", "")
    broken = [Candidate("k0", "task0", "f", lambda: fails)] * 50
    assert len(list(probe.choose([*broken, *candidates(1, 3)], 4, "ann"))) == 4


# Figures ------------------------------------------------------------------------------------------------


def written(function="flashattention_kernel"):
    file = "task4/attention_kernel.cu"
    text = (ROOT / file).read_text()
    return Written("task4", file, regions.regions(text, file)[0], text)


def records(**changes):
    """A student's records with one figure: 0.1 ms for 4 * 64 * 64 * 128 operations."""
    figure = {
        "shape": "B1 S64 hidden 128, 2 heads, non-causal",
        "dtype": "float32",
        "ours": {"median_ms": 0.1},
    } | changes
    chip = {"fp32_tflops": 10.0, "read_gb_per_s": 1000.0}
    return {"stages": {"task4": {"benchmarks": {"attention alone, x": figure}, "reference": chip}}}


def test_a_measurement_against_the_roofline():
    question = figures.about_measurement(records(), written(), "attention alone, x")
    # 2,097,152 operations and 131,072 bytes: 16 per byte, above the ridge at 10
    assert "operations per byte" in question.answer and "16 operations" in question.answer
    assert "**operations** bound" in question.answer
    assert "0.021 of 10 TFLOP/s" in question.answer


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        [],
        {"stages": []},
        {"stages": {"task4": {"benchmarks": [1]}}},
        records(ours={"median_ms": float("nan")}),
        records(ours={"median_ms": "1"}),
        records(ours={"median_ms": True}),
        records(dtype=["float32"]),
        records(shape="B0 S64 hidden 128, 2 heads, causal"),
        records(shape="\x1b[2J"),
    ],
)
def test_records_of_a_student_can_be_anything(wrong):
    assert figures.measured(wrong, "task4") == []
    assert figures.about_measurement(wrong, written(), "attention alone, x") is None


def test_the_limits_of_an_sm_are_those_of_the_cpu_layer():
    source = (ROOT / "common/cuda_on_cpu/runtime/settings.cpp").read_text()
    rows = re.findall(r"\{(\d+), (\d+) \* KiB, (\d+) \* KiB, (\d+), (\d+), \d+\}", source)
    ours = [(g.arch, g.shared_of_block, g.shared, g.threads, g.blocks) for g in launches.GPUS]
    assert ours == [
        (int(a), 1024 * int(b), 1024 * int(c), int(d), int(e)) for a, b, c, d, e in rows
    ]


@pytest.mark.parametrize(
    ("threads", "shared", "registers", "blocks", "limit"),
    [
        (256, 0, None, 8, "threads"),
        (32, 0, None, 32, "blocks"),
        (256, 29_184, None, 5, "shared memory"),
        (256, 29_184, 68, 3, "registers"),
        (1024, 8_192, 32, 2, "threads and registers"),
        (256, 164_864, None, 1, "shared memory"),
        (256, 168_000, None, 0, "shared memory"),
    ],
)
def test_blocks_on_an_a100(threads, shared, registers, blocks, limit):
    a100 = next(gpu for gpu in launches.GPUS if gpu.arch == 80)
    assert launches.blocks_per_sm(a100, threads, shared, registers) == (blocks, limit)


def test_the_command_prints_the_page_of_the_seed_that_graded(tmp_path, monkeypatch, capsys):
    (tmp_path / "ann/task1").mkdir(parents=True)
    result = {"name": "ann", "total": 0, "remarks": [], "ignored": [], "failed": False, "seed": 5}
    result["stages"] = {}
    calls = []
    monkeypatch.setattr(grade, "course", lambda *_: nullcontext("fresh"))
    monkeypatch.setattr(one, "grade", lambda *_: result)
    monkeypatch.setattr(one, "_write_pages", lambda *_: None)
    monkeypatch.setattr(run, "table", lambda results: "")
    monkeypatch.setattr(run, "_write_report", lambda *_: None)
    monkeypatch.setattr(one, "viva", lambda *rest: calls.append(rest) or "# ann: [1] of 2")
    out = tmp_path / "out"
    assert grade.main([str(tmp_path / "ann"), "--out", str(out), "--viva", "2"]) == 0
    assert [(c[0].name, *c[1:]) for c in calls] == [("ann", "fresh", out, 2, 5)]
    assert "# ann: [1] of 2" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        grade.main([str(tmp_path), "--viva", "-1"])
    assert "--viva must be 0 (no questions) or more; got -1" in capsys.readouterr().err


# Submissions --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """The pages and questions of two submissions: one solved, one broken and hostile; and where that would write."""
    folder = tmp_path_factory.mktemp("viva")
    solved, broken, empty = (folder / name for name in ("solved", "broken", "empty"))
    student_edition.make(empty)
    shutil.copytree(empty, solved)
    restore(solved)
    (solved / "common/records").mkdir()
    shutil.copyfile(ROOT / "common/records/cuda.json", solved / "common/records/cuda.json")
    shutil.copytree(empty, broken)
    restore(broken, stages=[2])
    kernel = broken / CU
    kernel.write_text(kernel.read_text().replace("float m = -INFINITY;", "float m = -INFINITE;", 1))
    mark = folder / "mark"
    put(
        broken,
        "task1/attention.py",
        f"        open({str(mark)!r}, 'w')\n        x += 1\n        return x\n",
    )
    kernel = f'  static int once = system("touch {mark}");\n  if (once >= 0) return;\n'
    put(broken, "task4/attention_kernel.cu", kernel)
    found = {}
    with pytest.MonkeyPatch.context() as patch, course(Console(quiet=True)) as fresh:
        render = page._page
        patch.setattr(source, "refused", lambda *_: None)  # to see what holds back the hostile one
        patch.setattr(
            page, "_page", lambda *rest: found.update({rest[0]: rest[2]}) or render(*rest)
        )

        def ask(path, number):
            return page.viva(Submission(path.name, path), fresh, folder / "out", number, 7)

        pages = {
            "solved": ask(solved, len(KINDS)),
            "broken": ask(broken, 40),
            "empty": ask(empty, 3),
        }
        patch.setattr(page, "_ask", lambda *_: pytest.fail("asked again"))
        assert ask(solved, len(KINDS)) == pages["solved"]
    assert (folder / "out/solved/viva.md").read_text().startswith(pages["solved"])
    return pages, found, mark, solved


def put(edition, file, lines):
    path = edition / file
    found = regions.regions(path.read_text(), file)
    path.write_text(regions.join([found[0]._replace(lines=lines), *found[1:]]))


def test_one_question_of_each_kind(asked):
    pages, found, _, solved = asked
    assert sorted(q["kind"] for q in found["solved"]) == sorted(KINDS)
    for question in found["solved"]:
        text = (solved / question["file"]).read_text()
        assert question["code"] == text.split("\n")[question["line"] - 1]
        here = regions.regions(text, question["file"])
        assert any(r.begin < question["line"] < r.end for r in here)
        assert question["code"].strip() in pages["solved"]


def test_the_answers_hold_what_was_computed(asked):
    answers = {question["kind"]: question for question in asked[1]["solved"]}
    barrier = answers["barrier"]
    assert "__sync" in barrier["code"]
    if "race" in barrier["answer"]:  # both lines, and the element
        named = re.findall(rf"{barrier['file']}:(\d+)", barrier["answer"])
        assert len(set(named)) >= 2 and re.search(r"race on \w+\[\d+\]", barrier["answer"])
    else:
        assert "uninitialised shared memory" in barrier["answer"]
    assert re.search("out of range|race on|largest error", answers["guard"]["answer"])
    assert "with `" in answers["guard"]["answer"].lower()
    for kind in ("maximum", "statement"):
        assert "this fails:\n\n    " in answers[kind]["answer"]
    passes = re.search(
        r"of a warp take ([\d,]+) passes, and ([\d,]+) is the least", answers["conflicts"]["answer"]
    )
    assert int(passes[1].replace(",", "")) >= int(passes[2].replace(",", "")) > 0
    assert (
        "| sm_90 |" in answers["occupancy"]["answer"] and " B | " in answers["occupancy"]["answer"]
    )
    assert "| 0 | 6 | 6 |\n| 1 | 6 | 4 |\n| 2 | 6 | 2 |" in answers["tiles"]["answer"]
    assert "ridge" in answers["measured"]["answer"]
    chosen = int(re.match(r"\*\*(\d+)\*\*", answers["splits"]["answer"])[1])
    assert f"\n| {chosen} | " in answers["splits"]["answer"]


@needs_sandbox
def test_hostile_code_runs_in_the_sandbox_alone(asked):
    assert "task1" in {question["stage"] for question in asked[1]["broken"]}  # it has run
    assert not asked[2].exists()


def test_what_does_not_compile_is_asked_about(asked):
    pages, found, _, _ = asked
    compiles = [q for q in found["broken"] if q["stage"] == "task2"]
    assert [q["kind"] for q in compiles] == ["failure"]
    assert (
        "INFINITE" in compiles[0]["code"] and "The compiler refuses this" in compiles[0]["question"]
    )
    assert "of 40 questions" in pages["broken"] and "No more could be computed" in pages["broken"]


def test_where_nothing_is_written_nothing_is_asked(asked):
    assert asked[0]["empty"].startswith("# empty: 0 of 3 questions\n\nNothing is written in it.")
