"""The report on a CPU: the steps that are timed, and what compilers say of their loops."""

import torch

from common.report import host
from common.report.host import compiler
from task4.frontends import benchmark

OUT = torch.device("cpu")


def test_the_steps_of_naive_are_its_own(monkeypatch):
    q, k, v = (torch.randn(1, 9, 8, 64) for _ in range(3))
    scores, out = torch.empty(1, 8, 9, 9), torch.empty(1, 9, 8, 64)
    host._steps.query("step_scores", OUT, q=q, k=k, scores_of=scores, scale=0.125)
    host._steps.query("step_softmax", OUT, scores_of=scores)
    host._steps.query("step_product", OUT, scores_of=scores, v=v, out=out)
    torch.testing.assert_close(out, benchmark.pytorch(q, k, v, causal=False))


def test_the_probe_does_what_it_is_timed_for():
    part = 6 * 768  # floats of a thread: what any vectors read at a time divides them
    sums, data = torch.zeros(3), torch.ones(3 * part)
    read = host._probe.query(
        "read_memory", OUT, data=data, n=data.numel(), times=2, threads=3, sums=sums
    )
    assert read == data.numel() and sums.tolist() == [2 * part] * 3
    done = host._probe.query("multiply_add", OUT, a=0.5, b=1.0, times=40, threads=2, sums=sums)
    assert sums[:2].tolist() == [done] * 2  # each of done / 2 sums is 2


GCC = """\
task4/frontends/x.cpp:10:21: missed: couldn't vectorize loop
task4/frontends/x.cpp:10:21: missed: not vectorized: multiple nested loops.
task4/frontends/x.cpp:13:25: optimized: loop vectorized using 32 byte vectors
task4/frontends/x.cpp:13:25: optimized: loop vectorized using 16 byte vectors
task4/frontends/x.cpp:13:25: missed: couldn't vectorize loop
/usr/include/c++/12/cmath:13:49: missed: not vectorized: no vectype for stmt: _191 = *_190;
 scalar_type: float
task4/frontends/x.cpp:42:16: note: vectorized 4 loops in function.
task4/frontends/elements.h:69:23: optimized: loop vectorized using 32 byte vectors
task4/frontends/elements.h:70:23: missed: couldn't vectorize loop
task4/frontends/elements.h:70:23: missed: not vectorized: control flow in loop.
task4/frontends/x.cpp:98:23: missed: couldn't vectorize loop
task4/frontends/x.cpp:99:23: missed: not vectorized: no vectype for stmt: _1 = MEM[(const struct Row &)_2].at[0];
 scalar_type: Vector
task4/frontends/x.cpp:99:23: missed: not vectorized: unsupported data-type
"""
CLANG = """\
task4/frontends/x.cpp:36:44: remark: loop not vectorized: cannot prove it is safe to reorder floating-point operations; allow reordering by specifying '#pragma clang loop vectorize(enable)' before the loop or by providing the compiler option '-ffast-math'. [-Rpass-analysis=loop-vectorize]
   36 |       for (int j = 0; j < kv_len; ++j) sum += P[j] * v[j];
      |                                            ^
task4/frontends/x.cpp:36:7: remark: loop not vectorized [-Rpass-missed=loop-vectorize]
task4/frontends/x.cpp:26:5: remark: vectorized loop (vectorization width: 8, interleaved count: 4) [-Rpass=loop-vectorize]
task4/frontends/x.cpp:24:5: remark: loop not vectorized: value that could not be identified as reduction is used outside the loop [-Rpass-analysis=loop-vectorize]
task4/frontends/x.cpp:24:5: remark: loop not vectorized [-Rpass-missed=loop-vectorize]
task4/frontends/y.h:7:5: remark: loop not vectorized [-Rpass-missed=loop-vectorize]
"""


def test_what_compilers_say_of_loops():
    assert compiler.read("gcc", GCC, "task4/frontends/x.cpp") == {
        10: "no: `multiple nested loops`",
        13: "yes, 32 bytes; not in some copies: `no vectype for stmt: _191 = *_190;`",
        98: "no: `its numbers are vectors already`",
    }
    assert compiler.read("clang", CLANG, "task4/frontends/x.cpp") == {
        36: "no: `cannot prove it is safe to reorder floating-point operations`",
        26: "yes, 8 numbers",
        24: "no: `value that could not be identified as reduction is used outside the loop`",
    }


def test_the_loops_of_a_file():
    loops = compiler.loops(host.FILES[0])
    assert len(loops) == 12 and {loop.place.partition(":")[0] for loop in loops} == {"naive.cpp"}
    (divides,) = (loop for loop in loops if "row[j] / l" in loop.source)
    assert divides.verdict.startswith("yes, ")
    assert host._code("a || b") == "`a \\|\\| b`"
