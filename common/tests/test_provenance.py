"""Where a number comes from: the driver, and how a machine and a run are described."""

import sys
from types import SimpleNamespace

import pytest

from common.record import describe_machine, describe_run, machine
from common.record.provenance import _driver

FACTS = {"cpu": "AMD EPYC", "cores": 2, "system": "Linux x86_64", "python": "3.11", "torch": "2.13"}


def test_the_driver_is_asked_through_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    library = SimpleNamespace(
        nvmlInit=lambda: calls.append("begin"),
        nvmlSystemGetDriverVersion=lambda: "580.1",
        nvmlShutdown=lambda: calls.append("end"),
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert _driver() == "580.1" and calls == ["begin", "end"]


def test_no_driver_and_no_package_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("NVML Shared Library Not Found")

    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(nvmlInit=fail))
    assert _driver() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as if it were not installed
    assert _driver() is None


def test_machines_and_runs_in_a_line() -> None:
    assert describe_machine(FACTS) == "AMD EPYC, 2 cores, Linux x86_64, Python 3.11, torch 2.13"
    gpu = FACTS | {"gpu": "NVIDIA H200", "driver": None, "cuda": "13.0", "transformers": "5.23"}
    assert describe_machine(gpu) == (
        "NVIDIA H200 (driver unknown, CUDA 13.0), Python 3.11, torch 2.13, transformers 5.23"
    )
    run = {"date": "2026-01-01T00:00:00Z", "commit": None, "dirty": None, "machine": FACTS}
    assert describe_run(run).startswith("2026-01-01T00:00:00Z, outside of git, AMD EPYC")
    run |= {"commit": "abc", "dirty": True}
    assert "commit abc with uncommitted changes, AMD" in describe_run(run)


def test_this_machine_is_described() -> None:
    facts = machine("cpu")
    assert "gpu" not in facts and facts["cores"] >= 1 and describe_machine(facts)
