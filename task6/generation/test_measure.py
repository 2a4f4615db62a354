"""Measuring generation: the sides, the parts of a step, the bars, what is written, and the command."""

import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from common.memory import NotEnoughMemory
from common.paths import ROOT
from common.record.grid import Grid
from common.tests.devices import DEVICE, HOPPER, of_gpus_hopper
from task6.generation import (
    CONFIGS,
    Config,
    Decoder,
    Weights,
    bars,
    benchmark,
    endurance,
    graded,
    peers,
    plot,
    record,
    table,
)
from task6.generation import __main__ as command
from task6.generation import breakdown as parts
from task6.generation.bars import COURSE, COURSE_FP32, LLAMA, TENSOR_CORES
from task6.generation.benchmark import OURS, Case, Found, run
from task6.generation.breakdown import GAPS, Part
from task6.generation.graded import Beside
from task6.generation.measure import Speed, generate, measure, step_bytes
from task6.generation.record import Record, Tables, Times

PLAIN = Config(2, 128, 2, 2, 64, 512, 61)  # task 6's model has this architecture too
GROUPED = Config(2, 256, 4, 2, 64, 320, 97, tied=True, rope_base=500.0, eps=1e-5)
TINY = Case("tiny", 2, 5, 6, "float32")
READ = 4000.0  # GB/s


def made(config, batch=2, length=30):
    torch.manual_seed(4)
    weights = Weights.random(config, device=DEVICE)
    prompt = torch.randint(config.vocab, (batch, 5), device=DEVICE)
    return weights, Decoder(weights, batch, length, persistent=False), prompt


# Times ------------------------------------------------------------------------------------------------------


def test_a_speed():
    weights, decoder, prompt = made(GROUPED)
    tokens = generate(decoder, prompt, 8)
    assert torch.equal(tokens, decoder.generate(prompt, 8))
    speeds = measure({"a": decoder, "b": decoder}, prompt, 8, rounds=2)
    for speed in speeds.values():
        assert speed.first.n == 2 and speed.between.n == 2 * 7
        assert 0 < speed.between.p10_ms <= speed.between.median_ms <= speed.p99_ms
    # tied: the last product reads all of the embedding
    assert step_bytes(decoder, 5 + 4) == 4 * (GROUPED.weights + 2 * 2 * 2 * 2 * 64 * (5 + 4))
    with pytest.raises(ValueError, match="two tokens or more"):
        measure({"a": decoder}, prompt, 1)


@pytest.mark.parametrize("make", [peers.Readable, peers.HuggingFace, peers.compiled])
def test_every_side_gives_the_same_tokens(make, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda run, **how: run)  # it would take ten seconds
    weights, decoder, prompt = made(PLAIN)
    before = [t.clone() for t in vars(weights.layers[1]).values()]
    side = make(weights, 2, 30)
    want = generate(decoder, prompt, 12)
    for _ in range(2):  # the second text on the same cache
        assert torch.equal(generate(side, prompt, 12), want)
    assert all(map(torch.equal, before, vars(weights.layers[1]).values()))


def test_the_sides_share_the_weights():
    weights, _, _ = made(PLAIN)
    for model in (peers.Readable(weights, 1, 9)._model, peers.llama(weights)):
        mine = {t.untyped_storage().data_ptr() for t in vars(weights.layers[0]).values()}
        theirs = {w.untyped_storage().data_ptr() for w in model.parameters()}
        assert mine <= theirs


def test_grouped_heads_are_not_task_6s():
    weights, _, _ = made(GROUPED)
    with pytest.raises(ValueError, match="it has as many kv heads as heads"):
        peers.Readable(weights, 2, 30)


def test_a_case_is_measured(monkeypatch):
    monkeypatch.setitem(CONFIGS, "plain", PLAIN)

    def fails(*_):
        raise RuntimeError("a long story\nno such shape")

    case, device = Case("plain", 2, 5, 6, "float32"), torch.device(DEVICE)
    found = run(case, device=device, peers=peers.PEERS | {"library": fails}, profile=True)
    names = [peers.ONE_LAUNCH] * HOPPER + [peers.READABLE, peers.LLAMA]
    assert list(found.speeds) == [OURS, *names]
    assert found.same == dict.fromkeys(names, 6)
    assert found.left_out.pop("library") == "no such shape"
    reason = "a step in one launch is timed on a Hopper GPU alone"
    assert found.left_out == ({} if HOPPER else {peers.ONE_LAUNCH: reason})
    assert len(found.begins) == 6 and found.parts and case.length == 5 + parts.STEPS + 2
    assert found.held == 4 * (PLAIN.weights + PLAIN.cache(2, case.length))
    if DEVICE == "cuda":
        assert found.allocated / found.held >= 1 and found.allocated <= found.reserved


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": "gpt"}, "the configurations are tiny, course, llama-3.2-1b; got 'gpt'"),
        ({"batch": 0}, "--batch must be at least 1; got 0"),
        ({"prompt": -3}, "--prompt must be at least 1; got -3"),
        ({"new_tokens": 1}, "--new-tokens must be at least 2; got 1"),
        ({"dtype": "int8"}, "dtype must be one of float32, float16, bfloat16; got 'int8'"),
    ],
)
def test_cases_that_make_no_sense(change, message):
    with pytest.raises(ValueError, match=message):
        replace(TINY, **change)


def test_what_does_not_fit_is_known_before_anything_is_made(monkeypatch):
    monkeypatch.setattr(benchmark.Weights, "random", lambda *_, **__: pytest.fail("made"))
    c, case = CONFIGS["tiny"], TINY
    weights_alone = 4 * c.weights  # fit, but not with the cache
    monkeypatch.setattr("task6.generation.weights.free_memory", lambda _: (weights_alone, 0))
    with pytest.raises(NotEnoughMemory, match="weights, cache and .* need 7 MiB; 6 MiB are free"):
        run(case, device=torch.device(DEVICE))


# The parts of a step ----------------------------------------------------------------------------------------


def test_the_parts_of_a_step_add_up():
    product, append, decode = "void tensor_core_kernel<__half, 8>(Product)", "void append_kernel<T>(A)", "decode_kernel"  # fmt: skip
    sample = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>>>(R)"
    other = "void at::native::(anonymous namespace)::some_kernel<4>(int)"
    step = [product, append, decode, product, product, product, product, sample, other]
    ran, now = [], 0.0
    for name in step * 2:
        ran.append((name, now, now + 10.0))
        now += 8.0 if name == append else 12.0  # the kernel behind append begins 2 us early
    found = {p.name: p for p in parts.parts_of(ran[::-1], 2, 1, {"o": 8e6, "attention": 4e6})}
    assert set(found) == {*parts.PRODUCTS, parts.LOGITS, "append, RoPE", "attention", "sampling", "some_kernel", GAPS}  # fmt: skip
    assert found["attention"].us == 8.0 and found["o"].us == 10.0
    assert found["o"].calls == 1 and found["o"].kernel == "tensor_core_kernel"
    assert found["o"].floor(4000.0) == 2.0 and found["down"].floor(4000.0) is None
    assert found[GAPS].calls == 0 and found[GAPS].us == (2 * 8 - 1) * 2.0 / 2
    assert sum(p.us for p in found.values()) == pytest.approx((now - 2.0) / 2)
    merged = parts.parts_of(ran[:-3], 2, 1, {"product": 1e6})  # an unknown order
    assert {p.name for p in merged} >= {"product"} and not {p.name for p in merged} & {"o"}
    assert parts.parts_of([], 2, 1, {}) == []


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("void float_kernel<4>(Product)", "product"),
        ("nvjet_hsh_64x8_64x16_4x1_v_bz_TNT", "product"),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16>(float)", "product"),
        ("void add_rms_norm_kernel<float>(float*)", "norm"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgs)", "sum of processes"),
        ("void at::native::vectorized_gather_kernel<16, long>(char*)", "embedding"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD"),
    ],
)
def test_what_a_kernel_does(kernel, kind):
    assert parts._kind(kernel) == kind


def test_the_bytes_of_the_parts_are_those_of_a_step():
    _, decoder, _ = made(GROUPED)
    moved = parts.part_bytes(decoder, 9)
    assert moved["product"] == sum(moved[name] for name in (*parts.PRODUCTS, parts.LOGITS))
    norms = 4 * GROUPED.hidden * (2 * GROUPED.layers + 1)
    assert moved["product"] + moved["attention"] + norms == step_bytes(decoder, 9)


@of_gpus_hopper
def test_the_parts_of_a_step_in_one_launch():
    config = Config(2, 64, 2, 1, 64, 64, 50)
    weights = Weights.random(config, device=torch.device(DEVICE), dtype=torch.float32)
    decoder = Decoder(weights, 1, 3 + parts.STEPS, persistent=True)
    found = parts.phases(decoder, torch.randint(50, (1, 2), device=DEVICE), 100.0)
    assert {part.name for part in found} == {
        "embedding",
        "attention",
        *parts.PRODUCTS,
        parts.LOGITS,
    }
    assert sum(part.us for part in found) == pytest.approx(100) and found[-1].us > 0
    moved = parts.part_bytes(decoder, 2 + 1 + parts.STEPS / 2)
    assert all(part.bytes == moved[part.name] for part in found)


# Bars, the record, its text and its picture -----------------------------------------------------------------


def speed(first, between):
    return Speed.of([first] * 3, [0.99 * between, between, 1.01 * between])


def made_up(case, first, between, world=1):
    """A step that has to read 13 GB, 3.25 ms at READ; of the smaller model 2.6 GB."""
    found = Found(
        case,
        world,
        (2.6e9 if case == LLAMA else 13e9) / world,
        10**10,
        int(1.03e10),
        int(1.06e10),
        1980,
        [1, 2, 3],
    )
    found.speeds = {OURS: speed(first, between), peers.READABLE: speed(first, 3 * between)}
    found.same = {peers.READABLE: 99}
    found.left_out = {peers.LLAMA: "out of memory"}
    found.parts = [Part("o", "tensor_core_kernel", 24, 900.0, 3e9), Part(GAPS, "", 0, 30.0), Part("x", "x", 1, 0.1)]  # fmt: skip
    found.one_launch = [Part("o", "", 24, 800.0, 3e9), Part("embedding", "", 1, 5.0)]
    return found


def facts(date="2026-01-01"):
    found = record.origin("cpu", 1)
    gpu = {"gpu": "NVIDIA H200", "driver": "580", "cuda": "13.0"}
    return found | {"date": date, "machine": found["machine"] | gpu}


def times(date="2026-01-01"):
    found = [made_up(COURSE, 84.0, 3.3), made_up(COURSE_FP32, 990.0, 6.8), made_up(LLAMA, 5.0, 0.7)]
    found.append(made_up(TENSOR_CORES, 451.0, 6.8))
    return Times(facts(date), READ, found)


def test_bars_are_judged():
    grid = bars.grid(times())
    judged = {row[0]: (row[1], row[3]) for row in grid.rows}
    assert len(judged) == 5 + 5 + 2 + 1
    assert judged[f"{COURSE}: time between tokens"] == ("3.3 ms", "met")
    assert judged[f"{COURSE}: the same, relative to the floor"] == ("1.015", "met")
    assert judged[f"{COURSE}: memory allocated, relative to weights and cache"] == ("1.03", "met")
    assert judged[f"{COURSE}: memory reserved, relative to weights and cache"][1] == "not met !"
    assert judged[f"{COURSE_FP32}: time between tokens"] == ("6.8 ms", "not met !")
    assert judged[f"{TENSOR_CORES}: time to the first token"] == ("451 ms", "not met !")
    assert judged[f"{COURSE_FP32}: tokens equal to those of task 6's model"] == ("99 of 100", "not met !")  # fmt: skip
    assert judged[f"{LLAMA}: time between tokens"] == ("0.7 ms", "met")
    assert grid.bars.count(False) == 7


def test_the_faster_way_is_judged():
    found = made_up(COURSE_FP32, 990.0, 6.8)
    found.speeds[peers.ONE_LAUNCH] = speed(990.0, 6.6)
    found.same[peers.ONE_LAUNCH] = 100
    rows = bars.grid(Times(facts(), READ, [found])).rows
    judged = {name: (value, verdict) for name, value, _, verdict in rows}
    name = f"{COURSE_FP32}: time between tokens, a step in one launch"
    assert judged[name] == ("6.6 ms", "met")
    name = f"{COURSE_FP32}: tokens equal to those of the decoder, a step in one launch"
    assert judged[name] == ("100 of 100", "met")


@pytest.mark.parametrize(("world", "between", "verdict"), [(2, 2.0, "met"), (4, 1.4, "not met !")])
def test_the_bar_of_several_gpus(world, between, verdict):
    found = [made_up(COURSE, 84.0, 3.3), made_up(COURSE, 60.0, between, world)]
    (row,) = bars.grid(Times(facts(), READ, found)).rows
    assert row[0].endswith(f"on {world} GPUs, relative to one") and row[3] == verdict


def test_several_gpus_are_compared_with_the_faster_way_of_one():
    alone, both = made_up(COURSE, 84.0, 4.0), made_up(COURSE, 60.0, 2.0, 2)
    alone.speeds[peers.ONE_LAUNCH] = speed(84.0, 3.0)
    (row,) = bars.grid(Times(facts(), READ, [alone, both])).rows
    assert row[1] == "0.6667" and row[3] == "not met !"
    both.speeds[peers.ONE_LAUNCH] = speed(60.0, 1.5)
    (row,) = bars.grid(Times(facts(), READ, [alone, both])).rows
    assert "on 2 GPUs, a step in one launch, relative to one" in row[0] and row[1] == "0.5"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """table.json and RESULTS.md of its own."""
    for module in (table, plot):
        monkeypatch.setattr(module, "FOLDER", tmp_path)
    monkeypatch.setattr(record, "TABLE", tmp_path / "table.json")
    names = ("bars", "times", "steps", "shared", "graded", "tokens")
    marks = (f"<!-- ladder: {name} -->\n<!-- end: {name} -->\n" for name in names)
    (tmp_path / "RESULTS.md").write_text("mine\n" + "".join(marks) + "mine\n")
    return tmp_path


def test_the_record_is_read_as_it_was_written(folder):
    tokens = Tables(facts(), [Grid("10 tokens", ["", "found"], [["x", "1"]], [True])])
    shared = Times(facts(), READ, [made_up(COURSE, 84.0, 3.3), made_up(COURSE, 60.0, 2.0, 2)])
    graded = Tables(facts(), [Grid("products", ["", "x PyTorch"], [["x", "3.10"]], [True])])
    full = Record(times(), {"2": shared}, tokens, graded)
    record.save(full)
    again = record.load()
    for a, b in zip(again.bars.found, full.bars.found, strict=True):
        assert a.case == b.case and a.parts == b.parts and a.same == b.same
        assert a.ours.between.median_ms == b.ours.between.median_ms
        assert a.ours.p99_ms == b.ours.p99_ms
    assert (
        again.shared["2"].found[1].world == 2 and again.tokens == tokens and again.graded == graded
    )
    record.save(again)
    assert record.load() == again


def test_results_are_filled_in_between_the_markers_only(folder):
    table.write(Record())
    assert (folder / "RESULTS.md").read_text().count("Not measured yet") == 6
    full = Record(times("2026-03-03"))
    (folder / "step.png").touch()
    table.write(full)
    text = (folder / "RESULTS.md").read_text()
    assert text.startswith("mine\n") and text.endswith("\nmine\n") and "(step.png)" in text
    assert "6 of 13 bars met" in text and text.count("Not measured yet") == 3
    assert "A pure read in the same run: 4,000 GB/s." in text and "2026-03-03" in text
    assert f"| {OURS} | 84 | 3.3 | " in text and "| floor |  | 3.25 |" in text
    assert f"- {COURSE}: {peers.LLAMA}: out of memory" in text
    assert "allocated 9.6 GiB (1.030 x), reserved 9.9 GiB (1.060 x)" in text
    assert "| o | tensor_core_kernel | 24 | 37.50 | 900.0 | 96.8% | 3,000 | 83% |" in text
    assert "| o |  | 24 | 33.33 | 800.0 | 99.4% | 3,000 | 94% |" in text
    assert "a step in one launch of 805 us" in text and table.STALE not in text
    full.bars.run["sources"]["sha256"] = "0"
    assert table.STALE in table.rendered(full)
    full.graded = Tables(
        facts("2026-04-04"), [Grid("products", ["", "x"], [["a", "3.10"]], [True])]
    )
    text = table.rendered(full)
    assert "| a | 3.10 |" in text and "2026-04-04" in text and text.count("Not measured yet") == 2
    full.graded.run["sources"]["sha256"] = "0"
    assert table.STALE_PRODUCTS in table.rendered(full)


def test_the_committed_results_are_what_is_rendered_from_the_record():
    """All but whether the decoder has changed since, which table.json does not say."""

    def lines(text):
        return [
            line
            for line in text.splitlines()
            if line not in (table.STALE, table.STALE_PRODUCTS, "")
        ]

    committed = (record.FOLDER / "RESULTS.md").read_text("utf-8")
    assert lines(committed) == lines(table.rendered(record.load())), (
        "task6/generation/RESULTS.md is not as table.json has it: python -m task6.generation --render"
    )


def test_the_picture(folder):
    pytest.importorskip("matplotlib")
    full = times()
    assert plot.draw(full).stat().st_size > 10_000
    assert [part.name for part in plot._drawn(full.found[0].parts)] == ["o", GAPS, "1 others"]
    for found in full.found:
        found.parts = []
    assert plot.draw(full)
    for found in full.found:
        found.one_launch = []
    assert plot.draw(full) is None


# Float32 products -------------------------------------------------------------------------------------------


def beside(theirs, errors=None, ours=300.0, note=""):
    return Beside("made up", speed(0, ours).between, speed(0, theirs).between, note, 2e12, errors)


def test_float32_products_are_judged():
    fine = {"normal": (0.25, 0.5), "subnormal": (1.0, 1.2)}
    lost, nan = {"normal": (1.01, 1.0)}, {"normal": (0.2, 0.3), "tiny": (math.nan, 0.1)}
    rows = [beside(900.0, fine), beside(899.0, lost), beside(900.0, nan), beside(math.nan, fine)]
    grid = graded.product_grid([*rows, beside(900.0)])
    judged = [row[-4:] for row in grid.rows]
    assert judged[0] == ["3.00", "1.00", "subnormal", "1.20"] and grid.rows[0][-5] == "7"
    assert judged[1] == ["3.00 !", "1.01 !", "normal", "1.00"]
    assert judged[2] == ["3.00", "nan !", "tiny", "0.30"] and judged[3][:2] == ["nan !", "1.00"]
    assert judged[4] == ["3.00", "nan !", "-", "nan"]
    assert grid.bars == [True, True, False, False, True, False, False, True, True, False]
    scaled = beside(600.0, note="scaled down: batch 32")
    grid = graded.layer_grid([beside(900.0), scaled, beside(900.0, ours=math.nan)])
    assert [row[-1] for row in grid.rows] == ["3.00", "2.00 !", "nan !"]
    assert grid.bars == [True, False, False] and grid.rows[1][0] == f"made up; {scaled.note}"


def test_errors_are_multiples_of_pytorchs(monkeypatch):
    torch.manual_seed(0)
    x, w = torch.randn(64, 30), torch.randn(20, 30)
    truth = x.double() @ w.double().T
    off = 1e-3 * torch.randn(64, 20) * (x.abs() @ w.abs().T)
    ours, theirs = ((truth + scale * off).float() for scale in (2, 1))
    rms, largest = graded.relative_errors(ours, theirs, x, w)
    assert rms == pytest.approx(2, rel=1e-3) and largest == pytest.approx(2, rel=1e-3)
    ours[3, 4] = torch.nan
    assert graded.relative_errors(ours, theirs, x, w) == (math.inf, math.inf)
    theirs[3, 4] = torch.nan
    assert all(map(math.isnan, graded.relative_errors(ours, theirs, x, w)))
    monkeypatch.setattr(graded, "CHECKED", 16)  # rows 0, 4, 8 ...
    assert graded.relative_errors(ours, theirs, x, w)[0] == pytest.approx(2, rel=1e-3)
    zero = torch.zeros(2, 20)
    assert graded.relative_errors(zero, zero, torch.zeros(2, 30), w) == (0, 0)


def test_float32_products_are_measured(monkeypatch):
    """All but the times, with PyTorch's own product in place of ours on a CPU."""

    def measured(sides, *, check, seconds):
        check({name: side() for name, side in sides.items()})
        return dict(zip(sides, (beside(900.0).ours, beside(900.0).theirs), strict=True))

    monkeypatch.setattr(graded, "measure", measured)
    monkeypatch.setattr(graded, "SIZES", ((40, 30, 20), (90, 30, 20)))
    for name, size in dict(CHECKED=16, BATCH=2, SEQ=12, HIDDEN=128, HEADS=2).items():
        monkeypatch.setattr(graded, name, size)
    products, layer = graded.grids(1, "cpu")
    assert [row[0] for row in products.rows] == ["40 x 30 x 20", "90 x 30 x 20"]
    assert all(row[-4:-2] == ["3.00", "1.00"] for row in products.rows)
    names = [f"B2 S12 hidden 128, 2 heads, {mask}" for mask in ("non-causal", "causal")]
    assert [row[0] for row in layer.rows] == names and layer.bars == [True, True]


# Endurance --------------------------------------------------------------------------------------------------


class Repeats:
    """A decoder whose tokens are 0, 1, 2 ... in each text; with ``wrong`` once another one."""

    def __init__(self, wrong=None):
        self.batch, self.max_seq_len, self.config = 2, 12, GROUPED
        self.tokens, self.wrong, self.steps = torch.zeros(2, 1, dtype=torch.int64), wrong, 0

    def prefill(self, prompt):
        self.tokens = torch.zeros_like(self.tokens)
        return self.step()

    def step(self):
        self.steps += 1
        self.tokens = self.tokens + (2 if self.steps == self.wrong else 1)
        return self.tokens


def test_many_tokens_twice(monkeypatch):
    said = []
    grid = endurance.run(Repeats(), 5, 7, 20, 1, said.append)
    assert grid.bars == [True] * 4 and said[-1].startswith("20 of 20 tokens, again: ")
    assert grid.title.startswith("20 tokens for each of 2 sequences, in 3 texts, twice, in ")
    assert not endurance.run(Repeats(wrong=9), 5, 7, 20, 1, said.append).bars[0]
    with pytest.raises(ValueError, match="a prompt of 5 and 8 new tokens need .* has 12"):
        endurance.run(Repeats(), 5, 8, 20, 1, said.append)
    growing = iter([(0, 0, 0), (1, 2, 10**8)])
    monkeypatch.setattr(endurance, "memory", lambda device: next(growing))
    assert endurance.run(Repeats(), 5, 7, 20, 1, said.append).bars == [True, False, False, False]


def test_the_memory_of_this_process_is_known():
    assert endurance.memory(torch.device("cpu"))[2] > 10**7 or sys.platform != "linux"


# The command ------------------------------------------------------------------------------------------------

SMALL = ["--device", "cpu", "--config", "tiny", "--dtype", "float32", "--batch", "2", "--prompt", "5", "--new-tokens", "6"]  # fmt: skip


def test_the_command(capsys):
    assert command.main([*SMALL, "--profile"]) == 0
    shown = capsys.readouterr().out
    for words in ("first token", "between tokens", "99 %", "tokens/s", "GB/s", OURS, peers.LLAMA, "operator"):  # fmt: skip
        assert words in shown
    assert "task 6's model: it has as many kv heads as heads" in shown and "6 of 6" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "gpt"], "the configurations are tiny, course, llama-3.2-1b; got 'gpt'"),
        (["--batch", "0"], "--batch must be at least 1; got 0"),
        (["--prompt", "-1"], "--prompt must be at least 1; got -1"),
        (["--new-tokens", "0"], "--new-tokens must be at least 2; got 0"),
    ],
)
def test_bad_input_is_one_sentence(arguments, message, capsys):
    assert command.main([*SMALL, *arguments]) == 1
    assert capsys.readouterr().out == f"task6.generation: {message}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], "--tokens must be at least 1; got 0"),
        (["--tokens", "5", "--bars"], "not allowed with"),
        (["--dtype", "int8"], "invalid choice"),
        (["--seed", "1" * 23], "a seed is a whole number from 0 to 2147483647; got 111"),
        (["--device", "cpu", "--bars"], "--bars needs a GPU"),
        (["--device", "cpu", "--products", "tensor cores"], "is for float32 on a Hopper GPU; got"),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        command.main(arguments)
    assert end.value.code == 2 and message in capsys.readouterr().err


def test_a_number_of_processes_that_does_not_divide(monkeypatch, capsys):
    """Known before the processes look for each other; the first of them says it."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_RANK", "0")
    for rank, said in (("0", "the number of processes must divide heads; got 3 and 4"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        assert command.main(SMALL) == 1
        assert said in (shown := capsys.readouterr().out) and bool(shown) == bool(said)


def test_many_tokens_through_the_command(folder, capsys):
    assert command.main([*SMALL, "--tokens", "14"]) == 0
    shown = capsys.readouterr().out
    assert "14 tokens for each of 2 sequences, in 3 texts" in shown and "4 of 4 bars met" in shown
    assert not record.TABLE.exists()  # of a CPU nothing is kept


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE from 1 on; got {'WORLD_SIZE': '0'}"),
        ({"WORLD_SIZE": "two"}, "torchrun sets whole numbers"),
        ({"WORLD_SIZE": "2"}, "of 2 processes each has its RANK, from 0 to 1, and LOCAL_RANK"),
        ({"WORLD_SIZE": "2", "RANK": "2", "LOCAL_RANK": "0"}, "from 0 to 1"),
    ],
)
def test_an_environment_that_is_not_torchruns(environment, message, monkeypatch, capsys):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as end:
        command.main(SMALL)
    assert end.value.code == 2 and message in capsys.readouterr().err


def test_results_that_were_not_measured(folder):
    assert command.main(["--render"]) == 0
    assert "Not measured yet" in (folder / "RESULTS.md").read_text()


@pytest.fixture
def on_gpu(folder, monkeypatch):
    """The command as on a GPU, with made-up times."""
    pytest.importorskip("matplotlib")
    made_up_times = {found.case: found for found in times().found}
    for name, stand_in in {
        "device_of": lambda _: torch.device("cuda", 0),
        "reference": lambda: type("Chip", (), {"read_gb_per_s": READ}),
        "run": lambda case, **asked: made_up_times[case],
        "origin": lambda device, seed, *sources: facts("2026-05-05"),
    }.items():
        monkeypatch.setattr(command, name, stand_in)
    monkeypatch.setattr(graded, "grids", lambda seed: [graded.layer_grid([beside(1100.0)])])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return made_up_times


def test_the_bars_of_a_gpu_are_kept(on_gpu, folder, monkeypatch, capsys):
    assert command.main(["--bars"]) == 1  # seven are missed
    shown = capsys.readouterr().out
    assert "6 of 13 bars met" in shown
    assert set(json.loads(record.TABLE.read_text())) == {"bars", "shared", "tokens", "graded"}
    assert "3.67" in shown and "1 of 1 bars met" in (folder / "RESULTS.md").read_text()
    assert "2026-05-05" in (folder / "RESULTS.md").read_text() and (folder / "step.png").exists()
    on_gpu[COURSE].speeds[OURS] = speed(84.0, 2.0)  # 13 GB in 2 ms
    assert command.main(["--bars"]) == 1
    assert "2 ms for a step is impossible: its bytes take 3.25 ms" in capsys.readouterr().out
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert command.main(["--bars"]) == 1
    assert "each process needs a GPU of its own: there are 1" in capsys.readouterr().out


def test_the_bars_of_two_gpus_are_kept_beside_them(on_gpu, folder, monkeypatch):
    record.save(Record(times()))
    monkeypatch.setattr(
        command, "run", lambda case, group=None, **asked: made_up(case, 60.0, 2.0 if group else 3.3, 2 if group else 1)
    )  # fmt: skip
    options = command._parse(["--bars"], "prog")
    group = type("Two", (), {"rank": 0, "world": 2, "sum": lambda self, x: x})()
    options.device = "cpu"
    assert command._shared_bars(options, group) == 0
    kept = record.load()
    assert [found.world for found in kept.shared["2"].found] == [1, 2] and kept.bars
    assert "on 2 GPUs, relative to one" in (folder / "RESULTS.md").read_text()


def test_task_6s_test_hands_over(monkeypatch):
    assert command.asked_for(["--config=tiny"]) and command.asked_for(
        ["--seed", "1", "--batch", "2"]
    )
    assert not command.asked_for(["--prefill", "--seed", "1"])
    done = subprocess.run(
        [sys.executable, "-m", "task6.test", "--config", "gpt"], cwd=ROOT, capture_output=True, text=True
    )  # fmt: skip
    assert done.returncode == 1 and done.stdout.startswith(
        "task6.generation: the configurations are"
    )
