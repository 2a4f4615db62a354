"""Are the tests any good? ``python -m common.staff.mutate [--stage N ...] [NAME ...]`` runs them on wrong solutions.

mutants/taskN.toml has them as data: each replaces one text of a solution. A mutant has to be killed by its stage's own
tests, as ``python -m taskN.test`` and ``python -m taskN.test --check`` run them, in every one of several runs with new
inputs, and by a check: a crash of the process does not count. mutants/RESULTS.md gets what was found; a run of some
mutants replaces their lines there.

    [[mutant]]
    name = 'maximum starts at 0'
    file = 'task2/attention_kernel.cu'     # or once at the top, for all of the file
    search = 'float m = -INFINITY;'        # has to be there; the first one is replaced
    replace = 'float m = 0.0f;'
    group = 'softmax'                      # whose checks should kill it

With --reference the solutions themselves are run, as they are. They have to pass everything in every run.
"""

import argparse
import importlib
import json
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from rich.console import Console

from common import child
from common.check.case import Item
from common.check.failure import failure_of
from common.check.progress import progress
from common.check.rng import new_seed
from common.marked import write_atomically
from common.paths import ROOT
from common.record import POINTS, describe_run, provenance
from common.record.grid import Grid
from common.staff.student_edition import tracked_files

FOLDER = Path(__file__).resolve().parent / "mutants"
TABLE = FOLDER / "RESULTS.md"
STAGES = range(1, len(POINTS) + 1)
RUNS = 20  # with inputs of their own
SECONDS = 600  # for one mutant
LIMIT = 10.0  # seconds for a case
LIVES = "LIVES"
KILLED = ("wrong", "kernel", "not written")  # categories of a failure that a check has found


@dataclass(frozen=True)
class Mutant:
    """A wrong solution: in ``file`` the first ``search`` is replaced. ``group`` has the checks that should kill it."""

    stage: str
    name: str
    file: str
    search: str
    replace: str
    group: str | None = None

    def applied(self, text: str) -> str:
        """The file's text with the mistake.

        Raises:
            ValueError: the text to replace is not there.
        """
        if self.search not in text:
            raise ValueError(f"{self.stage}, '{self.name}': {self.file} has no {self.search!r}")
        return text.replace(self.search, self.replace, 1)


@dataclass(frozen=True)
class Outcome:
    """What the tests made of a mutant in each run: the id of the item that killed it, or why it lives."""

    mutant: Mutant
    killers: list[str]  # of the runs that killed it
    lives: str  # why a run did not; "" if all did

    @property
    def killed(self) -> bool:
        return not self.lives


def load(stages: Iterable[int] = STAGES) -> list[Mutant]:
    """All mutants of these stages; a stage with nothing to write has none."""
    found = []
    files = (FOLDER / f"task{n}.toml" for n in stages)
    for stage, file in ((file.stem, file) for file in files if file.exists()):
        data = tomllib.loads(file.read_text(encoding="utf-8"))
        found += [Mutant(stage, **({"file": data["file"]} | entry)) for entry in data["mutant"]]
    return found


def run_tests(
    stage: str, group: str | None, device: str, seeds: Sequence[int]
) -> tuple[list[str], str]:
    """In a checkout with a mutant: run the stage's tests with each seed until one fails; killers and lives."""
    suite = importlib.import_module(f"{stage}.test").suite
    targets = ["cpu", "cpu-check"] if device == "cpu" else [device]
    items = [item for target in targets for item in suite.items([target])]
    items.sort(key=lambda item: item.check.group != group)
    killers: list[str] = []
    for seed in seeds:
        killer, problem = _first_failure(items, seed)
        if killer is None:
            return killers, problem
        killers.append(killer.id)
        items.remove(killer)
        items.insert(0, killer)  # it will probably kill it again, and at once
    return killers, ""


def _first_failure(items: Sequence[Item], seed: int) -> tuple[Item | None, str]:
    for item in items:
        try:
            item.run(seed, LIMIT)
        except Exception as error:
            failure = failure_of(error, item, seed, rerun=False)
            if failure.category in KILLED:
                return item, ""
            return None, f"{item.id} ended with {type(error).__name__}: {str(error)[:200]}"
    return None, f"passes all tests with --seed {seed}"


def examine(mutant: Mutant, checkout: Path, device: str, runs: int) -> Outcome:
    """Put the mutant into a copy of the checkout, run its stage's tests there, and take it out again."""
    path = checkout / mutant.file
    right = path.read_text(encoding="utf-8")
    path.write_text(mutant.applied(right), encoding="utf-8")
    seeds = [str(new_seed()) for _ in range(runs)]
    command = [sys.executable, "-m", "common.staff.mutate", "--inside", mutant.stage]
    command += [mutant.group or "", device, *seeds]
    lines: list[str] = []
    try:
        status = child.run(command, SECONDS, lines.append, cwd=checkout)
    finally:
        path.write_text(right, encoding="utf-8")
    if status is None:
        return Outcome(mutant, [], f"the tests took more than {SECONDS} s")
    found = [line for line in lines if line.startswith("[[")]
    if status or not found:
        last = lines[-1][:160] if lines else ""
        return Outcome(mutant, [], f"the process ended with status {status}: {last}")
    return Outcome(mutant, *json.loads(found[-1]))


def examine_all(
    mutants: Sequence[Mutant], device: str, runs: int, jobs: int, console: Console
) -> list[Outcome]:
    """All of them, ``jobs`` at a time; a line for each that lives."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, progress(console) as bar:
        checkouts: SimpleQueue[Path] = SimpleQueue()
        for job in range(jobs):
            checkout = Path(folder) / str(job)
            for file in tracked_files():
                (checkout / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / file, checkout / file)
            (Path(folder) / "build").mkdir(exist_ok=True)
            (checkout / ".build").symlink_to(Path(folder) / "build")
            checkouts.put(checkout)
        task = bar.add_task("mutants", total=len(mutants))

        def one(mutant: Mutant) -> Outcome:
            checkout = checkouts.get()
            try:
                outcome = examine(mutant, checkout, device, runs)
            finally:
                checkouts.put(checkout)
            bar.advance(task)
            if not outcome.killed:
                console.print(f"{mutant.stage}, '{mutant.name}' LIVES: {outcome.lives}")
            elif mutant.group and (others := _other_groups(outcome)):
                console.print(
                    f"{mutant.stage}, '{mutant.name}': killed by {others}, not {mutant.group}"
                )
            return outcome

        with ThreadPoolExecutor(jobs) as pool:
            try:
                return list(pool.map(one, mutants))
            except KeyboardInterrupt:
                pool.shutdown(wait=False, cancel_futures=True)
                child.end_all()
                raise


def check_reference(stages: Iterable[int], device: str, runs: int, console: Console) -> bool:
    """Whether the solutions of these stages pass all their tests in every run; a line for each stage."""
    right = True
    targets = ["cpu", "cpu-check"] if device == "cpu" else [device]
    for stage in (f"task{n}" for n in stages):
        suite = importlib.import_module(f"{stage}.test").suite
        items = [item for target in targets for item in suite.items([target])]
        failures = []
        with progress(console) as bar:
            for seed in bar.track([new_seed() for _ in range(runs)], description=stage):
                for item in items:
                    try:
                        item.run(seed)
                    except Exception as error:
                        failures.append(failure_of(error, item, seed).text)
        console.print(f"{stage}: {runs} runs of {len(items)} cases, {len(failures)} failures")
        console.print("\n".join(failures[:3]), end="\n" if failures else "")
        right = right and not failures
    return right


def _other_groups(outcome: Outcome) -> str:
    suite = importlib.import_module(f"{outcome.mutant.stage}.test").suite
    groups = {check.name: check.group for check in suite.checks}
    names = {groups[killer.partition("-")[0]] for killer in outcome.killers}
    return ", ".join(sorted(names - {outcome.mutant.group}))


def table(outcomes: Sequence[Outcome], before: str, runs: int, device: str) -> str:
    """mutants/RESULTS.md with these outcomes; mutants that were not run keep their lines of ``before``."""
    rows = {
        (outcome.mutant.stage, outcome.mutant.name): (
            ", ".join(dict.fromkeys(outcome.killers)) if outcome.killed else LIVES
        )
        for outcome in outcomes
    }
    rows = _rows(before) | rows
    mutants = [m for m in load() if (m.stage, m.name) in rows]
    killed = sum(rows[m.stage, m.name] != LIVES for m in mutants)
    latest = describe_run(provenance(("common/staff/mutants/*.toml",), device=device, seed=0))
    lines = [
        "# Wrong solutions, and what finds them",
        "",
        "<!-- mutants: table -->",
        "Written by `python -m common.staff.mutate`. Each mutant is a solution with one mistake. The tests of its"
        " stage, which students have too, must reject it in every run, with inputs that are new in each.",
        "",
        f"{killed} of {len(mutants)} mutants killed. The latest run, of {len(outcomes)} of them with {runs} seeds:"
        f" {latest}",
        "",
    ]
    for stage in dict.fromkeys(mutant.stage for mutant in mutants):
        grid = Grid("", ["mutant", "file", "killed by"])
        mine = (mutant for mutant in mutants if mutant.stage == stage)
        grid.rows += ([m.name, m.file, rows[m.stage, m.name]] for m in mine)
        lines += [f"## {stage}", "", *grid.markdown()]
    return "\n".join([*lines, "<!-- end: table -->"]) + "\n"


def _rows(text: str) -> dict[tuple[str, str], str]:
    """What a table says of each mutant, by its stage and name."""
    rows, stage = {}, ""
    for line in text.splitlines():
        if line.startswith("## "):
            stage = line[3:]
        elif len(cells := line.split(" | ")) == 3 and stage:
            rows[stage, cells[0].removeprefix("| ")] = cells[2].removesuffix(" |")
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 0 if every mutant is killed."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--inside"]:
        stage, group, device, *seeds = argv[1:]
        print(json.dumps(run_tests(stage, group or None, device, [int(seed) for seed in seeds])))
        return 0
    options = _parse(argv)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if options.reference:
        ok = check_reference(options.stage, options.device, options.runs, console)
        return 0 if ok else 1
    mutants = [m for m in load(options.stage) if not options.name or m.name in options.name]
    if unknown := set(options.name) - {mutant.name for mutant in mutants}:
        print(f"error: no mutant is named {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    outcomes = examine_all(mutants, options.device, options.runs, options.jobs, console)
    killed = sum(outcome.killed for outcome in outcomes)
    console.print(f"{killed} of {len(outcomes)} mutants killed, {options.runs} runs each")
    if options.device == "cpu" and options.runs >= RUNS:
        before = TABLE.read_text(encoding="utf-8") if TABLE.exists() else ""
        write_atomically(TABLE, table(outcomes, before, options.runs, options.device))
        console.print(f"written: {TABLE.relative_to(ROOT)}")
    if options.name:
        for outcome in outcomes:
            console.print(f"{outcome.mutant.name}: {', '.join(dict.fromkeys(outcome.killers))}")
    return 0 if killed == len(outcomes) else 1


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m common.staff.mutate", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--stage",
        type=int,
        nargs="+",
        choices=STAGES,
        default=list(STAGES),
        metavar="N",
        help="only these (1 to 7; 7 has nothing written, and so no mutants)",
    )
    parser.add_argument(
        "--reference", action="store_true", help="the solutions as they are: all have to pass"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    parser.add_argument("--runs", type=int, default=RUNS, help=f"of each mutant; default: {RUNS}")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time; default: 2")
    parser.add_argument("name", nargs="*", help="only these")
    options = parser.parse_args(argv)
    if min(options.runs, options.jobs) < 1:
        parser.error(f"--runs and --jobs must be at least 1; got {options.runs} and {options.jobs}")
    return options


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        child.end_all()
        sys.exit(130)
    except (subprocess.SubprocessError, ValueError) as error:
        sys.exit(f"error: {error}")
