"""Grading in the jobs of a Slurm cluster, through submitit: ``python -m common.staff.grade SUBMISSION... --slurm``.

A job grades a few submissions, one after the other, as the command does on one machine. It works on what lies below
OUT, and its results come back as files there: OUT, the submissions and this checkout have to be where all nodes see
them. A job that Slurm ends costs the submission that it was at; the others that it had are sent again.

Partition, account and other options come from sbatch's own variables, such as ``SBATCH_PARTITION``.
"""

import hashlib
import importlib.util
import json
import math
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from getpass import getuser
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console

from common.paths import ROOT
from common.record import write_json
from common.staff.grade import one
from common.staff.grade.course import Course
from common.staff.grade.one import Options
from common.staff.grade.pages import Result
from common.staff.grade.submission import Submission, shown
from common.staff.judge import sandbox

if TYPE_CHECKING:
    import submitit

JOBS = 100  # in an array, at most: clusters limit how many a user may have
SECONDS = 2 * one.SECONDS  # for a submission: on the CPU, on a GPU, and for questions
CPUS = 2  # one process checks, one runs the student's code
MEMORY_GB = 3.5
POLL = 3.0  # seconds from one look at the jobs to the next
END = 60.0  # seconds that jobs have to end, once they are cancelled
LATE = 20.0  # seconds after which another node's file is seen on a network's file system
OVER = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "GONE", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
    "TIMEOUT",
}  # fmt: skip
EXPECTED = {"None", "Priority", "Resources", "JobArrayTaskLimit", "BeginTime"}  # why a job waits


class State(NamedTuple):
    """What Slurm says of a job."""

    name: str
    reason: str


@dataclass
class _Batch:
    """A job, and its submissions without a result; it is at the first one."""

    job: "submitit.Job"
    waiting: list[Submission]
    over_since: float = math.inf


def missing() -> str:
    """What ``--slurm`` lacks here, in a sentence; "" if nothing."""
    if importlib.util.find_spec("submitit") is None:
        return "--slurm needs submitit, in the version that pyproject.toml names under slurm"
    if shutil.which("sbatch") is None:
        return (
            "--slurm needs Slurm's commands, and there is no sbatch on PATH: run it on a login node"
        )
    return ""


@contextmanager
def scratch(out: Path, console: Console) -> Iterator[Path]:
    """A folder below OUT for a run. What a run that was killed has left, its jobs as well, is removed first."""
    folder = out / ".slurm"
    if folder.exists():
        console.print("ending what an earlier run has left")
        _cancel(_name(out))
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def grade(
    submissions: Sequence[Submission], course: Course, options: Options, jobs: int | None
) -> Iterator[Result]:
    """The results as they come. Whatever happens, the jobs are over when it ends.

    Args:
        submissions: to be graded, where that is not known from an earlier run.
        course: in a folder that all nodes see, like ``options.out``.
        options: how they are graded.
        jobs: how many there may be at a time.

    Raises:
        SlurmError: the jobs are not accepted.
    """
    done = {entry.name: one.known(entry, course, options) for entry in submissions}
    for entry in submissions:
        if done[entry.name]:
            yield one.graded(entry, course, options)
    run = _Run(course, options, jobs)
    try:
        run.send([entry for entry in submissions if not done[entry.name]])
        while run.batches:
            yield from run.look()
            time.sleep(POLL if run.batches else 0)
    finally:
        if run.batches:
            _cancel(_name(options.out))


class SlurmError(RuntimeError):
    """The cluster does not take the jobs; the text says why."""


class _Run:
    """The jobs of a run."""

    def __init__(self, course: Course, options: Options, jobs: int | None) -> None:
        self.course, self.options = course, options
        self.jobs = jobs or JOBS
        self.folder = course.edition.parent / "jobs"
        self.results = course.edition.parent / "results"
        self.results.mkdir()
        self.batches: list[_Batch] = []
        self.told: set[str] = set()

    def send(self, entries: Sequence[Submission]) -> None:
        """An array of jobs for these submissions."""
        if not entries:
            return
        size = math.ceil(len(entries) / JOBS)
        groups = [list(entries[at : at + size]) for at in range(0, len(entries), size)]
        minutes = math.ceil(size * SECONDS / 60)
        name = _name(self.options.out)
        executor = _executor(self.folder, name, minutes, self.jobs, self.options.gpu)
        work = partial(_work, course=self.course, options=self.options, results=self.results)
        try:
            sent = executor.map_array(work, groups)
        except (RuntimeError, OSError) as error:
            said = str(error).strip().splitlines() or ["sbatch failed"]
            raise SlurmError(said[-1]) from None
        self.batches += [_Batch(job, group) for job, group in zip(sent, groups, strict=True)]

    def look(self) -> Iterator[Result]:
        """What has come since the last look. What a job that is over has left undone is sent again."""
        states = _states(_name(self.options.out))
        there = {path.name for path in self.results.iterdir()}  # after the states: all that it had
        again: list[Submission] = []
        for batch in self.batches:
            for entry in [entry for entry in batch.waiting if f"{entry.name}.json" in there]:
                batch.waiting.remove(entry)
                yield self._result(entry)
            if batch.waiting and states is not None:
                state = states.get(batch.job.job_id, State("GONE", "Slurm no longer knows it"))
                yield from self._judge(batch, state, again)
        self.batches = [batch for batch in self.batches if batch.waiting]
        self.send(again)

    def _judge(self, batch: _Batch, state: State, again: list[Submission]) -> Iterator[Result]:
        """The results of what a job that is over has not done. What was cancelled is not sent again."""
        if state.name == "PENDING" and state.reason not in EXPECTED:
            self._tell(f"jobs wait for Slurm: {state.reason}")
        if state.name not in OVER:
            batch.over_since = math.inf
            return
        batch.over_since = min(batch.over_since, time.monotonic())
        if time.monotonic() - batch.over_since < LATE:
            return
        why = f"its Slurm job {batch.job.job_id} ended: {state.name}"
        why += f" ({state.reason})" if state.reason not in ("None", "") else ""
        why += _last_words(batch.job.paths.stderr) if state.name == "FAILED" else ""
        lost = len(batch.waiting) if state.name == "CANCELLED" else 1
        for entry in batch.waiting[:lost]:
            yield one.not_graded(entry, self.options, why)
        again += batch.waiting[lost:]
        batch.waiting = []

    def _result(self, entry: Submission) -> Result:
        found = json.loads((self.results / f"{entry.name}.json").read_text(encoding="utf-8"))
        for sentence in found["missing"]:
            self._tell(f"warning: on a node, {sentence}")
        return found["result"]

    def _tell(self, sentence: str) -> None:
        """Print it, once."""
        if sentence not in self.told:
            self.told.add(sentence)
            print(sentence)


def _work(entries: Sequence[Submission], course: Course, options: Options, results: Path) -> None:
    """What a job does."""
    signal.signal(signal.SIGTERM, _terminated)  # what the submission runs is ended, too
    for entry in entries:
        file = results / f"{entry.name}.json"
        if not file.exists():  # Slurm may start a job again
            result = one.graded(entry, course, options)
            write_json(file, {"result": result, "missing": sandbox.missing()})


def _terminated(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


# Slurm ------------------------------------------------------------------------------------------------


def _name(out: Path) -> str:
    """Of the jobs, by which another run finds them."""
    return f"grade-{hashlib.sha256(str(out).encode()).hexdigest()[:12]}"


def _executor(folder: Path, name: str, minutes: int, jobs: int, gpu: bool) -> "submitit.Executor":
    import submitit

    executor = submitit.SlurmExecutor(folder)
    executor.update_parameters(
        job_name=name,
        time=minutes,
        cpus_per_task=CPUS,
        mem=f"{MEMORY_GB * 1024:.0f}M",
        array_parallelism=jobs,
        gpus_per_node=1 if gpu else None,
        use_srun=False,  # its step would have one CPU
        additional_parameters={"chdir": str(ROOT)},
    )
    return executor


def _states(name: str) -> dict[str, State] | None:
    """What Slurm says of the jobs with this name, by id; None if it says nothing, as while it is started again."""
    form = ["--noheader", "--array", "--format=%i|%T|%r"]
    said = _slurm("squeue", "--states=all", f"--name={name}", *form)
    if said is None:
        return None
    rows = (line.split("|") for line in said.splitlines())
    return {job: State(state, reason) for job, state, reason in rows}


def _cancel(name: str) -> None:
    """End the jobs with this name, and wait until they have ended."""
    _slurm("scancel", f"--name={name}")
    until = time.monotonic() + END
    while _slurm("squeue", "--noheader", f"--name={name}") != "" and time.monotonic() < until:
        time.sleep(0.5)


def _slurm(command: str, *options: str) -> str | None:
    call = [command, f"--user={getuser()}", *options]
    try:
        done = subprocess.run(call, capture_output=True, text=True, check=False, timeout=60)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout if done.returncode == 0 else None


def _last_words(file: Path) -> str:
    """The last line of a job's stderr."""
    try:
        with open(file, "rb") as stream:
            stream.seek(max(0, file.stat().st_size - 2000))
            lines = stream.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    said = [line.strip() for line in lines if line.strip()]
    return f": {shown(said[-1])}" if said else ""
