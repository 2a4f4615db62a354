"""What only a GPU can show: ``python -m common.staff.gpu_evidence [PART ...]``, all by default.

    sanitizer   compute-sanitizer's memcheck, racecheck, initcheck and synccheck of every kernel but decode's
                (common/tests/test_devices_agree.py), and all but initcheck of the tasks' small cases
    decode      the same four tools over the kernels of decode
    pytest      all tests with cuda tensors, among them the comparison of each kernel's outputs on CPU and GPU
    host        what a call of the ladder and a decode step of task 5 cost the host

Writes common/records/gpu_evidence.json and exits with status 1 if anything is not clean.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from common import child
from common.build import builder, library
from common.paths import ROOT
from common.record import git_commit, machine, now, write_json
from common.staff.host_cost import run_host

RECORD = ROOT / "common/records/gpu_evidence.json"
AGREE = "largest difference between CPU and GPU"

PYTEST = ["-m", "pytest", "-v", "-p", "no:cacheprovider"]  # -v names the kernel that hangs
# In two parts of the record: together they take long.
DECODE, OTHERS = "decode", "not decode"
# What a tool is not shown of them:
NOT = {
    # In clusters of 16 synccheck reports a missing wait for blocks 8 and on, also in a kernel that has nothing but an
    # mbarrier for what the blocks send each other; in clusters of 8 it does not. It seems to take their barriers for
    # those of blocks 0 and on.
    "synccheck": "(clusters and 16)",
    # Two groups of warps that have taken turns by bar.arrive race, says racecheck, where they later meet at a barrier,
    # also in a kernel that does nothing else; without turns they do not. Consumers of a chunk take turns.
    "racecheck": "chunk",
    # It sees only what instrumented kernels write, and takes the results of PyTorch's kernels for uninitialised. But
    # for a step in one launch, whose buffers PyTorch zeroes, only the course's kernels and copies run on the GPU.
    "initcheck": "step",
}
SMALL_CASES = [
    ["-m", f"{module}.test", "--check", "--device", "cuda", "--no-timing"]
    for module in ("task2", "task4", "task5", "task4.ladder")
]
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


def kernels(tool: str, part: str) -> list[str]:
    """The test of DECODE's kernels or of the OTHERS, as a tool runs it."""
    chosen = f"{part} and not {NOT[tool]}" if tool in NOT else part
    return [*PYTEST, "common/tests/test_devices_agree.py", "-k", chosen]


JOBS = [(tool, kernels(tool, OTHERS)) for tool in TOOLS]
JOBS += [(tool, test) for test in SMALL_CASES for tool in ("memcheck", "racecheck", "synccheck")]
LONGEST = 300  # seconds for one job; racecheck of the ladder, the longest on an H200, took 110


def sanitize(tool: str, test: list[str]) -> dict:
    """Run a test on the GPU under one of compute-sanitizer's tools; returns the job's entry in the record."""
    # racecheck reports a race in cuDNN's attention, which PyTorch may use for its side of a comparison.
    exclude = ["--kernel-name-exclude", "kernel_substring=cudnn"]
    sanitizer = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *exclude]
    command = [*sanitizer, sys.executable, *test]
    env = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    lines: list[str] = []
    begin = time.monotonic()
    status = child.run(command, LONGEST, lines.append, cwd=ROOT, env=env)
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", "\n".join(lines))
    if status is None:
        summary = [f"stopped after {LONGEST} s"]
    name = " ".join(test[len(PYTEST) :] if test[1] == "pytest" else test[1:2])
    took = time.monotonic() - begin
    print(
        f"  {tool:9} {name}, {took:.0f} s: {summary[-1] if summary else 'no summary'}", flush=True
    )
    clean = status == 0 and bool(summary) and all("SUMMARY: 0 " in line for line in summary)
    if not clean:
        mark = "========="  # also behind the name of the test that pytest runs
        found = [x[x.index(mark) :] for x in lines if mark in x and "Host Frame" not in x]
        rest = [line for line in lines if mark not in line]
        print("\n".join([*(x[:300] for x in found[:60]), *(line[:160] for line in rest[-40:])]))
    return {"tool": tool, "test": name, "clean": clean, "summary": summary}


def run_pytest() -> dict:
    """All tests: how many passed, and the largest difference between CPU and GPU for each kernel."""
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / "pytest.xml"
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", f"--junitxml={xml}"], cwd=ROOT, check=False
        )
        if not xml.exists():
            return {"passed": 0, "failed": 0, "skipped": 0, "ok": False, "devices_agree": {}}
        suite = ElementTree.parse(xml).getroot().find("testsuite")
        counts = {
            name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")
        }
        agree = {
            re.sub(r".*\[(.*)\]", r"\1", case.get("name")): float(p.get("value"))
            for case in suite.iter("testcase")
            for p in case.iter("property")
            if p.get("name") == AGREE
        }
    failed = counts["failures"] + counts["errors"]
    passed = counts["tests"] - failed - counts["skipped"]
    for name, difference in agree.items():
        print(f"  {name}: {AGREE} {difference:.3g}")
    return {
        "passed": passed,
        "failed": failed,
        "skipped": counts["skipped"],
        "ok": done.returncode == 0,
        "devices_agree": agree,
    }


def run_sanitizer() -> dict:
    """All jobs but decode's, several at a time."""
    # For the CPU too, with which the kernels' test compares. Else each job would compile for itself.
    for device in ("cuda", "cpu"):
        build = [sys.executable, "-m", "common.build", "--device", device]
        subprocess.run(build, cwd=ROOT, check=True)
    return _run(JOBS)


def run_decode() -> dict:
    """Decode's kernels with each tool."""
    for device in map(torch.device, ("cuda", "cpu")):
        sources = sorted((ROOT / "task5").glob("**/*.cu"))
        builder.make([library.target_for(source, device) for source in sources])
    return _run([(tool, kernels(tool, DECODE)) for tool in TOOLS])


def _run(jobs: list[tuple[str, list[str]]]) -> dict:
    with ThreadPoolExecutor(7) as pool:
        try:
            runs = list(pool.map(lambda job: sanitize(*job), jobs))
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            child.end_all()
            raise
    return {"ok": all(run["clean"] for run in runs), "runs": runs}


def main() -> None:
    """The command."""
    parts = {
        "sanitizer": run_sanitizer,
        "decode": run_decode,
        "pytest": run_pytest,
        "host": run_host,
    }
    parser = argparse.ArgumentParser(
        prog="python -m common.staff.gpu_evidence", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "parts", nargs="*", choices=[[], *parts], metavar=" | ".join(parts), help="default: all"
    )
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    for part in parser.parse_args().parts or parts:
        print(f"{part}:", flush=True)
        commit, dirty = git_commit()
        run = {"date": now(), "commit": commit, "dirty": dirty, "machine": machine("cuda")}
        record[part] = run | parts[part]()
        write_json(RECORD, record)
    clean = all(part["ok"] for part in record.values())
    print(f"{'all clean' if clean else 'NOT clean'}: {RECORD.relative_to(ROOT)}")
    sys.exit(0 if clean else 1)


if __name__ == "__main__":
    main()
