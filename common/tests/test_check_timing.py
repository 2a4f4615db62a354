"""Timings, benchmarks and the records that keep them."""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch

from common.check import Case, CheckFailed, Rng
from common.check.attention import attention_float64
from common.record import Record, Worth, earned, sources_hash
from common.record.points import read as read_points
from common.record.typed import from_json
from common.tests.answers import make_suite, run
from common.timing import (
    Backend,
    Benchmark,
    ImpossibleRate,
    Reference,
    Timing,
    all_alike,
    measure,
    sdpa,
)

# Times and records -------------------------------------------------------------------------------


def timing(ms: float) -> Timing:
    return Timing(ms, ms * 0.9, ms * 1.2, 20)


def test_timing_statistics() -> None:
    found = Timing.of([float(i) for i in range(101)])
    assert (found.median_ms, found.p10_ms, found.p90_ms, found.n) == (50, 10, 90, 101)
    assert found.per(10).median_ms == 5


def test_a_benchmark_knows_its_shares() -> None:
    benchmark = Benchmark(
        "attention alone",
        shape="B1",
        dtype=torch.float32,
        ours=timing(2.0),
        baselines={"math": timing(5.0)},
        flops=4e10,
        bytes=2e9,
    )
    assert benchmark.tflops == pytest.approx(20) and benchmark.gb_per_s == pytest.approx(1000)
    assert benchmark.speedup("math") == 2.5
    record = benchmark.as_record(Reference(4000.0, 50.0, 800.0, 250.0))
    assert record["tflops"]["share"] == pytest.approx(0.4)
    assert record["tflops"]["of"] == "a float32 matrix product"
    assert record["gb_per_s"] == pytest.approx({"rate": 1000, "share": 0.25, "of": "a pure read"})
    with pytest.raises(ImpossibleRate, match="1000 GB/s is impossible: this GPU reaches 500"):
        benchmark.as_record(Reference(500.0, 50.0, 800.0, 250.0))


def test_float32_on_tensor_cores_is_compared_with_what_they_multiply() -> None:
    benchmark = Benchmark(
        "attention alone", "B1", torch.float32, timing(1.0), {}, flops=2e11, split=True
    )
    found = benchmark.as_record(Reference(4000.0, 50.0, 750.0, 250.0))["tflops"]
    assert found["share"] == pytest.approx(200 / 250)
    assert found["of"] == "a float32 matrix product split into three of 16 bits"
    # The limit is that of the tensor cores for both.
    for split in (False, True):
        benchmark.split = split
        benchmark.as_record(Reference(4000.0, 50.0, 180.0, 60.0))
        with pytest.raises(ImpossibleRate, match="200 TFLOP/s is impossible: this GPU reaches 170"):
            benchmark.as_record(Reference(4000.0, 50.0, 170.0, 60.0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nothing_is_timed_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="needs a GPU"):
        measure({"ours": lambda: None})
    suite, ran = make_suite(), []

    @suite.check("softmax", [Case("a", why="")])
    def right(case: Case, device: torch.device, rng: Rng) -> None: ...

    @suite.benchmark("speed", fields=("attention alone",))
    def speed(device: torch.device, record: Record) -> None:
        ran.append("speed")

    @suite.benchmark("text", devices=("cpu", "cuda"))
    def text(device: torch.device, record: Record) -> None:
        record.text("generated text", "Once upon a time")

    assert run(suite) == 0 and ran == []
    out = capsys.readouterr().out
    assert "speed: needs a GPU" in out and "generated text: Once upon a time" in out


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_measure_times_the_work() -> None:
    x = torch.randn(4096, 4096, device="cuda")

    def ratio() -> float:
        outputs = {}
        times = measure(
            {"one": lambda: x @ x, "four": lambda: [x @ x for _ in range(4)]},
            seconds=0.5,
            check=outputs.update,
        )
        assert set(outputs) == {"one", "four"}
        return times["four"].median_ms / times["one"].median_ms

    # Another process, such as a second worker of pytest, may take the GPU away in between.
    assert any(3 < ratio() < 5 for _ in range(5))
    with pytest.raises(CheckFailed):
        measure({"one": lambda: x}, seconds=0.1, check=lambda outputs: fail())


def fail() -> None:
    raise CheckFailed("wrong")


def test_a_benchmark_function_keeps_its_promises() -> None:
    record = Record(make_suite().stage, device="cpu", seed=1, complete=True)
    record.allowed = ("attention alone",)
    benchmark = Benchmark("another", "B1", torch.float32, timing(1), {})
    with pytest.raises(ValueError, match="not among the fields"):
        record.add(benchmark)


@pytest.mark.parametrize("error", [ImpossibleRate, CheckFailed, RuntimeError])
def test_a_benchmark_that_fails_fails_the_run(
    error: type[Exception], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    suite = make_suite()

    @suite.check("softmax", [Case("a", why="")])
    def right(case: Case, device: torch.device, rng: Rng) -> None: ...

    @suite.benchmark("speed", devices=("cpu",))
    def speed(device: torch.device, record: Record) -> None:
        raise error("900 TFLOP/s is impossible")

    file = tmp_path / "record.json"
    assert run(suite, "--record", str(file)) == 1
    found = json.loads(file.read_text())
    assert found["status"] == "failed" and "900 TFLOP/s is impossible" in found["problems"][0]
    out = capsys.readouterr().out
    assert "900 TFLOP/s is impossible" in out and ("Traceback" in out) == (error is RuntimeError)


def test_the_record(tmp_path: Path) -> None:
    suite = make_suite()

    @suite.check("softmax", [Case("a", why="")])
    def right(case: Case, device: torch.device, rng: Rng) -> None: ...

    @suite.check("gemm", [Case("a", why="")])
    def wrong(case: Case, device: torch.device, rng: Rng) -> None:
        raise AssertionError("no")

    @suite.check("attention", [Case("a", why="")])
    def crash(case: Case, device: torch.device, rng: Rng) -> None:
        assert json.loads(file.read_text())["status"] == "crashed"

    file = tmp_path / "record.json"
    assert run(suite, "--record", str(file), "--seed", "4") == 1
    record = json.loads(file.read_text())
    assert (record["stage"], record["device"], record["status"]) == ("task9", "cpu", "failed")
    assert [(g["name"], g["passed"], g["total"]) for g in record["groups"]] == [
        ("softmax", 1, 1),
        ("gemm", 0, 1),
        ("attention", 1, 1),
    ]
    assert (record["points"], record["earned"]) == (3, 2) and record["complete"]
    run_of = record["run"]
    assert run_of["seed"] == 4 and len(run_of["sources"]["sha256"]) == 64
    assert {"torch", "python", "cpu", "cores", "transformers"} <= set(run_of["machine"])
    assert run(suite, "--softmax", "--record", str(file)) == 0
    assert not json.loads(file.read_text())["complete"]


@dataclass
class Shelf:
    name: str
    times: dict[str, Timing]
    inner: "list[Shelf]"
    best: Timing | None = None


def test_dataclasses_from_json() -> None:
    inner = Shelf("inner", {}, [], timing(3.0))
    outer = Shelf("outer", {"ours": timing(1.0)}, [inner, inner])
    kept = json.loads(json.dumps({"a": asdict(outer)}))
    assert from_json(dict[str, Shelf], kept) == {"a": outer}
    with pytest.raises(KeyError, match="height"):
        from_json(Shelf, kept["a"] | {"height": 1})


def test_points() -> None:
    passed, failed = {"status": "passed"}, {"status": "failed"}
    assert earned(Worth(4), [passed, failed, passed]) == 2.67
    assert earned(Worth(3), 3 * [passed]) == 3 and earned(Worth(1), []) == 0
    given = passed | {"given": True}
    assert earned(Worth(1), [failed, given]) == 0 and earned(Worth(1), [passed, given]) == 1
    race = failed | {"only_check_build": True}
    assert earned(Worth(4), [passed, race]) == 2  # as long as points.toml says nothing else
    assert earned(Worth(4, check=0.25), [passed, race, failed, passed]) == 2.75


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[task1]\npoints = -1", "points must be 0 or more; got -1"),
        ("[task1]\npoints = 2\ncheck = 3", "task1: check must be from 0 to 1; got 3"),
        ("[task1]\npoints = 2\nspeeds = 1", "speeds"),
        ("[task1]\npoints = 'many'", "task1: "),
        ("task1 = 2", "task1: "),
        ("[task1]\npoints = 2\nspeed = 0.5", "speed needs bands"),
        ("[task1]\npoints = 2\nbands = [[0.5, 0.5], [0.9, 1.0]]", "highest ratio"),
        ("[task1]\npoints = 2\nbands = [[0.5, 5]]", "the part of 0.5 in bands must be from 0 to 1"),
    ],
)
def test_points_that_make_no_sense(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        read_points(text)


def test_the_sources_hash_follows_content_and_headers(tmp_path: Path) -> None:
    (tmp_path / "task9").mkdir()
    (tmp_path / "common/include").mkdir(parents=True)
    kernel, header = tmp_path / "task9/a.cu", tmp_path / "common/include/ptx.cuh"
    kernel.write_text("int a;")
    header.write_text("int b;")
    first = sources_hash(["task9/a.cu"], tmp_path)
    assert first == sources_hash(["task9/*.cu"], tmp_path)
    header.write_text("int c;")
    second = sources_hash(["task9/a.cu"], tmp_path)
    kernel.write_text("int d;")
    assert len({first, second, sources_hash(["task9/a.cu"], tmp_path)}) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_results_rounded_to_neighbours_are_alike(dtype) -> None:
    x = torch.randn(1000).to(dtype)
    all_alike({"ours": x, "theirs": x.nextafter(torch.zeros_like(x))})
    for wrong in (x + 0.05, x * 1.05, x.clone().index_fill_(0, torch.tensor(7), torch.nan)):
        with pytest.raises(AssertionError):
            all_alike({"ours": x, "alike": x, "wrong": wrong})


def test_sdpa_by_a_named_backend() -> None:
    q, k, v = (torch.randn(2, n, 3, 16) for n in (5, 7, 7))
    expected = attention_float64(q, k, v).float()
    for backend in (Backend.MATH, Backend.FLASH):
        torch.testing.assert_close(sdpa(q, k, v, backend=backend), expected)
    q, k, v = (torch.randn(2, 7, 3, 16) for _ in range(3))
    expected = attention_float64(q, k, v, causal=True, scale=0.5).float()
    got = sdpa(q, k, v, backend=Backend.MATH, causal=True, scale=0.5)
    torch.testing.assert_close(got, expected)
    mask = torch.ones(7, 7, dtype=torch.bool).tril()
    torch.testing.assert_close(sdpa(q, k, v, backend=Backend.MATH, mask=mask, scale=0.5), expected)
    assert f"{Backend.EFFICIENT}" == "SDPA memory-efficient"
    assert json.dumps({Backend.CUDNN: 1}) == '{"SDPA cuDNN": 1}'


def test_sdpa_refuses_what_would_mean_something_else() -> None:
    q, k = torch.randn(1, 2, 3, 16), torch.randn(1, 5, 3, 16)
    with pytest.raises(ValueError, match="as many queries as keys; got 2 queries and 5 keys"):
        sdpa(q, k, k, backend=Backend.MATH, causal=True)
    with pytest.raises(RuntimeError):  # it is not there on the CPU: nothing else runs in its place
        sdpa(q, k, k, backend=Backend.CUDNN)
