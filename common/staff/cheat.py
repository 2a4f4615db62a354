"""Does dishonesty pay? ``python -m common.staff.cheat [NAME ...]`` grades dishonest submissions.

cheats/*.toml has them as data. Each is graded as any submission is. It must get no point that it has not earned, and
its page must say why; honest submissions, among them other solutions than the course's, must get all that the checks
give, and what their speed earns. cheats/RESULTS.md gets what came out.

    [[cheat]]
    name = 'ends the process'
    imitates = 'os._exit with status 0'
    region = 'task1/attention.py: CustomSelfAttention.forward'
    code = 'import os; os._exit(0)'         # what stands in this region; a line HONEST is the file's `honest`
    reason = 'import of os'                 # which its page must have
    judge = 'has ended with status 0'       # what the checks alone would say, if its text were not looked at
    item = 'attention_matches_...-cpu'      # the check that shows it; default: the stage's first

`solved` are stages with the course's answers around it, `points` is what those may earn, `files` are other files that
it brings, `device` is 'gpu' for what only a GPU could show. One with `honest = true` must earn its points.

``--make FOLDER`` writes them as submissions, folders and zips in turn, with some mutants on top of full solutions.
"""

import argparse
import re
import sys
import tempfile
import textwrap
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console

from common import regions
from common.check.rng import new_seed
from common.marked import write_atomically
from common.paths import ROOT
from common.record import WORTH, describe_run, earned, provenance
from common.record.grid import Grid
from common.staff import mutate
from common.staff.grade import run
from common.staff.grade.course import Course, course
from common.staff.grade.one import Options
from common.staff.grade.pages import Result, feedback
from common.staff.grade.submission import Submission

FOLDER = Path(__file__).resolve().parent / "cheats"
TABLE = FOLDER / "RESULTS.md"
NEEDS_GPU = "needs a GPU"


@dataclass(frozen=True)
class Cheat:
    """A submission as data; the module's text says what the fields mean."""

    name: str
    imitates: str
    reason: str = ""
    judge: str = ""
    region: str = ""
    code: str = ""
    item: str = ""
    regions: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    solved: Sequence[int] = ()
    points: float = 0
    honest: bool = False
    device: str = "cpu"

    @property
    def codes(self) -> dict[str, str]:
        """The code of each region."""
        return ({self.region: self.code} if self.region else {}) | dict(self.regions)

    @property
    def stage(self) -> str:
        """The stage whose checks it wants to pass."""
        return next(iter(self.codes), "task1").partition("/")[0]


@dataclass(frozen=True)
class Outcome:
    """What a cheat got: its points, the line of its page that has the reason, and what is wrong with that."""

    cheat: Cheat
    earned: float
    said: str
    wrong: str


def load() -> list[Cheat]:
    """All of cheats/*.toml."""
    found = []
    for path in sorted(FOLDER.glob("*.toml")):
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        prelude = data.get("honest", "").strip("\n")
        for entry in data["cheat"]:
            entry = {key: data[key] for key in ("region",) if key in data} | entry
            if "files" in entry or "regions" in entry:
                entry.pop("region", None)
            code = textwrap.dedent(entry.get("code", "")).strip("\n")
            found.append(Cheat(**entry | {"code": code.replace("HONEST", prelude)}))
    return found


def write(cheat: Cheat, folder: Path, fresh: Course) -> None:
    """The submission, into a new folder."""
    for name in (name for names in fresh.files.values() for name in names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((fresh.edition / name).read_bytes())
    for stage in (f"task{n}" for n in cheat.solved):
        for name in fresh.files[stage]:
            (folder / name).write_bytes((ROOT / name).read_bytes())
    for place, code in cheat.codes.items():
        file, _, function = place.partition(": ")
        _put(folder / file, file, function, code)
    for name, text in cheat.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _put(path: Path, file: str, function: str, code: str) -> None:
    found = regions.regions(path.read_text(encoding="utf-8"), file)
    assert any(region.function == function for region in found), f"{file} has no {function}"
    given = {block.function: block.indent for block in regions.blocks(path.open(), file)}
    lines = textwrap.indent(code, given[function]) + "\n"
    found = [r._replace(lines=lines) if r.function == function else r for r in found]
    path.write_text(regions.join(found), encoding="utf-8")


def judged(cheat: Cheat, result: Result) -> Outcome:
    """What came out, against what should have."""
    page = [*result["remarks"], *feedback(result).splitlines()]
    said = next((line for line in page if cheat.reason in line), "")
    wrong = ""
    checks = sum(earned(WORTH[name], stage["groups"]) for name, stage in result["stages"].items())
    if cheat.honest and checks != cheat.points:
        wrong = f"the checks give an honest submission {checks:g} of {cheat.points:g} points"
        said = "; ".join(s["reason"] or s["status"] for s in result["stages"].values())
    elif result["total"] > cheat.points:
        wrong = f"it got {result['total']:g} points; it may have {cheat.points:g}"
    elif not said or result["failed"]:
        wrong = f"its page does not say {cheat.reason!r}"
    return Outcome(cheat, result["total"], "" if cheat.honest else said.strip(" -|"), wrong)


def make(cheats: Sequence[Cheat], fresh: Course, folder: Path) -> int:
    """Write all as submissions, and two mutants of each stage's answers on top of full solutions; how many."""
    mutants: list[mutate.Mutant] = []
    for stage in range(1, 7):
        mutants += [m for m in mutate.load([stage]) if _in_answers(m, fresh)][:2]
    whole = Cheat("whole", "", solved=range(1, 7))
    for number, entry in enumerate([*cheats, *mutants]):
        name = re.sub(r"\W+", "-", f"{number:02} {entry.name}")
        path = folder / name
        write(entry if isinstance(entry, Cheat) else whole, path, fresh)
        if isinstance(entry, mutate.Mutant):
            file = path / entry.file
            file.write_text(entry.applied(file.read_text(encoding="utf-8")), encoding="utf-8")
        if number % 2:
            _zip(path)
    return len(cheats) + len(mutants)


def _in_answers(mutant: mutate.Mutant, fresh: Course) -> bool:
    if mutant.file not in fresh.files[mutant.file.partition("/")[0]]:
        return False
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    before, after = (regions.regions(t, mutant.file) for t in (text, mutant.applied(text)))
    return [region.lines for region in before] != [region.lines for region in after]


def _zip(folder: Path) -> None:
    with zipfile.ZipFile(folder.with_name(f"{folder.name}.zip"), "w") as archive:
        for path in sorted(folder.rglob("*"), reverse=True):
            if path.is_file():
                archive.write(path, f"course/{path.relative_to(folder)}")
                path.unlink()
            else:
                path.rmdir()
    folder.rmdir()


def table(outcomes: Sequence[Outcome], skipped: Sequence[Cheat], device: str) -> str:
    """cheats/RESULTS.md."""
    latest = describe_run(provenance(("common/staff/cheats/*.toml",), device=device, seed=0))
    refused = [o for o in outcomes if not o.cheat.honest]
    gained = sum(bool(o.wrong) for o in refused)
    lines = [
        "# Dishonest submissions, and what they get",
        "",
        "<!-- cheats: table -->",
        "Written by `python -m common.staff.cheat`. Each is graded as every submission is.",
        "",
        f"{len(refused) - gained} of {len(refused)} dishonest submissions got nothing that they had not earned, with"
        f" the reason on their page. {latest}",
        "",
    ]
    grid = Grid("", ["submission", "imitates", "points", "what its page says"])
    for outcome in refused:
        said = outcome.wrong or outcome.said
        grid.rows.append([*_names(outcome.cheat), f"{outcome.earned:g}", _cell(said)])
    grid.rows += ([*_names(cheat), "-", NEEDS_GPU] for cheat in skipped)
    lines += ["## Dishonest", "", *grid.markdown(), ""]
    grid = Grid("", ["submission", "what it is", "points"])
    for outcome in (o for o in outcomes if o.cheat.honest):
        points = f"{outcome.earned:g} of {outcome.cheat.points:g}"
        grid.rows.append([*_names(outcome.cheat), points])
    return "\n".join([*lines, "## Honest", "", *grid.markdown(), "<!-- end: table -->"]) + "\n"


def _names(cheat: Cheat) -> list[str]:
    return [_cell(cheat.name), _cell(cheat.imitates)]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")[:160]


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 0 if no cheat gains and no honest submission loses."""
    parser = argparse.ArgumentParser(
        prog="python -m common.staff.cheat", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--jobs", type=int, default=2, help="submissions at a time; default: 2")
    parser.add_argument("--gpu", action="store_true", help="grade them with --gpu")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="keep what grading writes, with the class's report",
    )
    parser.add_argument("--make", type=Path, metavar="FOLDER", help="write them there instead")
    parser.add_argument("name", nargs="*", help="only these; the table stays as it is")
    options = parser.parse_args(argv)
    cheats = load()
    if unknown := set(options.name) - {cheat.name for cheat in cheats}:
        print(f"error: no cheat is named {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    wanted = [c for c in cheats if c.name in options.name or not options.name]
    runs = [c for c in wanted if c.device != "gpu"]
    if options.gpu and not torch.cuda.is_available():
        parser.error("--gpu: there is no GPU here that PyTorch can use")
    console = Console(highlight=False, markup=False, soft_wrap=True)
    with course(console) as fresh, tempfile.TemporaryDirectory(prefix="cheats-") as scratch:
        if options.make:
            console.print(f"{make(wanted, fresh, options.make)} submissions: {options.make}")
            return 0
        runs = {re.sub(r"\W+", "-", c.name): c for c in wanted if options.gpu or c.device != "gpu"}
        for name, cheat in runs.items():
            write(cheat, Path(scratch) / "in" / name, fresh)
        out = (options.out or Path(scratch) / "out").resolve()
        submissions = [Submission(name, Path(scratch).resolve() / "in" / name) for name in runs]
        how = Options(out, new_seed(), options.gpu)
        with closing(run.grade(submissions, fresh, how, options.jobs)) as coming:
            results = run.collect(coming, len(runs), out, out / "grades.csv", console)
    found = {result["name"]: result for result in results}
    outcomes = [judged(cheat, found[name]) for name, cheat in runs.items()]
    for outcome in (o for o in outcomes if o.wrong):
        console.print(f"{outcome.cheat.name}: {outcome.wrong}")
    if not options.name:
        skipped = [c for c in wanted if c not in runs.values()]
        write_atomically(TABLE, table(outcomes, skipped, "cuda" if options.gpu else "cpu"))
        console.print(f"written: {TABLE.relative_to(ROOT)}")
    wrong = [o.cheat.name for o in outcomes if o.wrong]
    console.print(f"{len(outcomes) - len(wrong)} of {len(outcomes)} as they should be")
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
