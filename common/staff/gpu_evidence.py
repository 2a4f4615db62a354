"""What only a GPU can show, in one go: ``python -m common.staff.gpu_evidence``.

    1. the whole pytest run, with cuda tensors
    2. each kernel's CPU and GPU outputs on the same inputs (common/tests/test_devices_agree.py, part of 1)
    3. compute-sanitizer's memcheck, racecheck, initcheck and synccheck on the small cases of tasks 2, 4 and 5

Writes common/records/gpu_evidence.json and ends with status 1 if anything is not clean.
"""

import json
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

from common.check.record import git_commit, machine, write_json

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "common/records/gpu_evidence.json"
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
STAGES = (2, 4, 5)
KERNELS = (  # only the course's own are examined, not PyTorch's
    "softmax_kernel_batched", "GEMM_NT_kernel_batched", "GEMM_NN_kernel_batched", "scale_and_causal_mask_batched",
    "flashattention_kernel", "update_cache_kernel", "flash_attention_decode_kernel", "combine_splits_kernel",
)  # fmt: skip
AGREE = "largest difference between CPU and GPU"


def sanitize(tool: str, stage: int) -> dict:
    """Run a stage's small cases on the GPU under one of compute-sanitizer's tools."""
    test = [sys.executable, "-m", f"task{stage}.test", "--check", "--device", "cuda", "--no-timing"]
    ours = [word for name in KERNELS for word in ("--kernel-name", f"kernel_substring={name}")]
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *ours, *test]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=540)
    output = done.stdout + done.stderr
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", output)
    print(f"  task{stage} {tool:9} {summary[-1] if summary else 'no summary'}", flush=True)
    clean = (
        done.returncode == 0
        and bool(summary)
        and all(re.search(r"SUMMARY: 0 ", line) for line in summary)
    )
    if not clean:
        print("\n".join(line[:160] for line in output.splitlines()[-40:]))
    return {"stage": f"task{stage}", "tool": tool, "clean": clean, "summary": summary}


def run_pytest() -> dict:
    """The whole test suite; how many passed, and how far CPU and GPU were apart for each kernel."""
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
    return {
        "passed": passed,
        "failed": failed,
        "skipped": counts["skipped"],
        "ok": done.returncode == 0,
        "devices_agree": agree,
    }


def main() -> None:
    """The command."""
    commit, dirty = git_commit()
    print("compute-sanitizer on the small cases:", flush=True)
    subprocess.run(
        [sys.executable, "-m", "common.build", "--device", "cuda"], cwd=ROOT, check=False
    )
    with ThreadPoolExecutor(4) as pool:
        jobs = [(tool, stage) for stage in STAGES for tool in TOOLS]
        sanitizer = list(pool.map(lambda job: sanitize(*job), jobs))
    print("pytest:", flush=True)
    tests = run_pytest()
    for name, difference in tests["devices_agree"].items():
        print(f"  {name}: {AGREE} {difference:.3g}")
    write_json(
        RECORD,
        {
            "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "commit": commit,
            "dirty": dirty,
            "machine": machine("cuda"),
            "pytest": tests,
            "compute_sanitizer": sanitizer,
        },
    )
    clean = tests["ok"] and all(run["clean"] for run in sanitizer)
    print(json.dumps({"clean": clean, "record": str(RECORD.relative_to(ROOT))}))
    sys.exit(0 if clean else 1)


if __name__ == "__main__":
    main()
