"""The hints: each piece has its own, none gives the line away, and they come one level at a time."""

import json
import re
from pathlib import Path

import pytest

from common.check import Case, hints
from common.check.hints import LEVELS, HintError, function_around, load, show
from common.staff.student_edition import LEFT_OUT, ROOT, Answer, cut, tracked_files
from common.tests.answers import make_suite, run

STAGES = [f"task{n}" for n in range(1, 8)]


def answers(stage: str) -> dict[str, list[Answer]]:
    """By file: what a student writes in it."""
    found = {}
    for file in tracked_files():
        ours = file.startswith(f"{stage}/") and not file.startswith(LEFT_OUT)
        if ours and file.endswith((".py", ".cu")):
            found[file] = cut((ROOT / file).read_text(), file).answers
    return found


def code(line: str) -> str:
    """A line without its comment and its spaces."""
    return re.sub(r"\s", "", re.sub(r"(//|#).*", "", line))


# The files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_each_answer_has_its_hints_and_each_hint_its_answer(stage: str) -> None:
    wanted = {(file, a.function) for file, found in answers(stage).items() for a in found}
    assert {(piece.file, piece.name) for piece in load(stage)} == wanted
    assert len(wanted) == len(load(stage)), "two answers in one function would share their hints"


@pytest.mark.parametrize("stage", STAGES)
def test_hints_go_from_a_question_to_nearly_the_line(stage: str) -> None:
    for piece in load(stage):
        assert LEVELS[0] <= len(piece.levels) <= LEVELS[1], piece.name
        assert "?" in piece.levels[0] and len(set(piece.levels)) == len(piece.levels), piece.name
        wide = [line for level in piece.levels for line in level.splitlines() if len(line) > 120]
        assert not wide, f"{piece.name}: {wide}"


@pytest.mark.parametrize("stage", STAGES)
def test_no_hint_contains_a_line_of_the_answer(stage: str) -> None:
    levels = {piece.name: code_of(piece.levels) for piece in load(stage)}
    for file, found in answers(stage).items():
        for answer in found:
            for line in map(code, answer.lines.splitlines()):
                short = len(line) <= 12  # such as "m_i = m;" or a brace
                assert short or line not in levels[answer.function], f"{file}: {line}"


def code_of(levels: tuple[str, ...]) -> str:
    return re.sub(r"\s", "", "\n".join(levels))


@pytest.mark.parametrize("stage", STAGES)
def test_the_size_is_the_answers_size(stage: str) -> None:
    for found in answers(stage).values():
        for answer in found:
            lines = [line for line in answer.lines.splitlines() if code(line)]
            size = next(p.size for p in load(stage) if p.name == answer.function)
            said = int(re.match(r"about (\d+) lines?: ", size)[1])
            assert abs(said - len(lines)) <= max(2, len(lines) // 4), (answer.function, len(lines))


@pytest.mark.parametrize("stage", STAGES)
def test_groups_are_the_flags_of_the_test(stage: str) -> None:
    text = (ROOT / stage / "test.py").read_text()
    groups = set(re.findall(r'@suite\.check\(\s*"([^"]+)"', text))
    for piece in load(stage):
        assert set(piece.groups) <= groups, piece.name


@pytest.mark.parametrize(
    "path, source, name",
    [
        ("a.py", "class A:\n    def f(self):\n        x = 1\n", "A.f"),
        ("a.py", "def f():\n    return 1\n\n\ndef g(x):\n", "g"),
        ("a.cu", "template <int N>\n__global__ void k(View a,\n      View b) {\n  f(a);\n", "k"),
        ("a.cu", "__global__ void __launch_bounds__(N* 2) k(A<T> a) {\n", "k"),
        ("a.cu", 'extern "C" cudaError_t launch(View q, cudaStream_t stream) {\n#pragma f(x)\n', "launch"),
        ("a.cu", "// not this(x)\nconstexpr int N = 3;\n", ""),
    ],
)  # fmt: skip
def test_the_function_around_an_answer(path: str, source: str, name: str) -> None:
    assert function_around(path, source.splitlines(keepends=True), "        ") == name


# The command --------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = ROOT / ".build" / f"hints-{tmp_path.name}.json"
    monkeypatch.setattr(hints, "STATE", path)
    yield path
    path.unlink(missing_ok=True)


def level(text: str) -> str:
    return next(line for line in text.splitlines() if line.startswith("hint "))


def test_one_level_at_a_time_and_the_last_again() -> None:
    said = [show("task1") for _ in range(5)]
    assert [level(s) for s in said] == [
        "hint 1 of 4",
        "hint 2 of 4",
        "hint 3 of 4",
        "hint 4 of 4",
        "hint 4 of 4, the last, once more",
    ]
    (piece,) = load("task1")
    for s, text in zip(said, [*piece.levels, piece.levels[-1]], strict=True):
        shown = [level for level in piece.levels if level.splitlines()[0] in s]
        assert shown == [text] and all(line in s for line in text.splitlines())
    assert "3 more for this: python -m task1.test --hint CustomSelfAttention.forward" in said[0]
    assert "That was the last hint" in said[3] and "That was the last hint" in said[4]


def test_the_pieces_of_a_stage_come_in_their_order() -> None:
    names = [piece.name for piece in load("task2")]
    said = [show("task2").split(" in ")[0] for _ in range(17)]
    assert said == [name for name in names for _ in range(4)] + [names[-1]]


def test_a_name_narrows_to_a_piece_or_a_group() -> None:
    assert show("task2", "custom_attention").startswith("custom_attention in task2/")
    assert show("task2", "gemm").startswith("GEMM_NT_kernel_batched in ")
    assert show("task2", "gemm_nn").startswith("GEMM_NN_kernel_batched in ")
    assert show("task2", groups=["gemm"]).startswith("GEMM_NT_kernel_batched in ")
    said = show("task2")
    assert said.startswith("softmax_kernel_batched in ") and level(said) == "hint 1 of 4"
    left = "GEMM_NT_kernel_batched (2), GEMM_NN_kernel_batched (3), custom_attention (3)"
    assert f"Hints left for the rest of task2: {left}." in said


def test_a_wrong_name_says_what_there_is(state: Path) -> None:
    with pytest.raises(
        HintError, match="task1 has a piece CustomSelf.*, or a group of checks atten"
    ):
        show("task1", "nothing")
    assert not state.exists()


def test_a_stage_without_answers_has_no_hints(state: Path) -> None:
    assert show("task7").startswith("task7 has nothing to write")
    assert not state.exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"task1": 3}', '{"task1": {"CustomSelfAttention.forward": "x"}}'])  # fmt: skip
def test_a_damaged_memory_starts_over(state: Path, text: str) -> None:
    state.parent.mkdir(exist_ok=True)
    state.write_text(text)
    assert level(show("task1")) == "hint 1 of 4"
    assert json.loads(state.read_text()) == {"task1": {"CustomSelfAttention.forward": 1}}


def test_where_nothing_can_be_written_the_hint_is_still_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(hints, "ROOT", tmp_path)
    monkeypatch.setattr(hints, "STATE", tmp_path / "file/hints.json")
    said = show("task1")
    assert level(said) == "hint 1 of 4" and "could not be remembered" in said


def test_the_option_runs_no_check(capsys: pytest.CaptureFixture, monkeypatch) -> None:
    suite = make_suite()

    @suite.check("softmax", [Case("one", why="it must not run")])
    def fails(case, device, rng):
        raise AssertionError

    monkeypatch.setattr("common.check.script.show", lambda *arguments: f"asked for {arguments}")
    assert run(suite, "--hint") == 0
    assert run(suite, "--hint", "f") == 0
    assert run(suite, "--softmax", "--hint") == 0
    said = capsys.readouterr().out
    assert said.splitlines() == [
        "asked for ('task9', '', [])",
        "asked for ('task9', 'f', [])",
        "asked for ('task9', '', ['softmax'])",
    ]


def test_an_unknown_piece_is_an_error_of_the_command(
    capsys: pytest.CaptureFixture, monkeypatch
) -> None:
    from task2.test import suite

    assert run(suite, "--hint", "nothing") == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: --hint: task2 has a piece softmax_kernel_batched,")


# What a file may be -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, says",
    [
        ("[[piece]\n", "task9/hints.toml is not TOML"),
        ('[[piece]]\nname = "f"\n', "task9/hints.toml: f: file must be a str that is not empty; got None"),
        ('[[piece]]\nname = "f"\nfile = "x"\ngroups = "g"\n', "f: groups must be a list"),
        (
            '[[piece]]\nname = "f"\nfile = "x"\ngroups = ["g"]\nsize = "s"\nlevels = ["a", "b"]\n',
            "f must have 3 to 4 levels; got 2",
        ),
    ],
)  # fmt: skip
def test_a_wrong_file_says_what_is_wrong(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "task9").mkdir()
    (tmp_path / "task9/hints.toml").write_text(text)
    with pytest.raises(HintError, match=re.escape(says)):
        load("task9", tmp_path)
