"""Task 2: your softmax and matrix products, then the attention made of them.

python -m task2.test [--softmax | --gemm | --attention] [--check]
"""

import contextlib

import torch

from common.check import Case, Suite, Watch, assert_close, strided_output
from common.check.attention import (
    NOT_ZERO,
    attention_float64,
    attention_pytorch,
    mistakes,
    references,
)
from common.check.attention_case import lay_out
from task2 import attention

suite = Suite(
    "task2",
    title="naive attention in CUDA",
    sources=("task2/attention.py", "task2/attention_kernel.cu", "common/layer.py"),
)

SOFTMAX = [
    Case("one element", why="the smallest input", small=True, rows=1, n=1),
    Case("shorter than the block", why="most threads have nothing to add", small=True, rows=3, n=37),
    Case("one past the block", why="one thread has two elements", small=True, rows=2, n=257),
    Case("long rows", why="each thread strides over the row", rows=64, n=3000),
    Case("many rows", why="the grid is the number of rows", rows=1000, n=100),
    Case("large values", why="exp(1000) overflows unless the maximum is subtracted", small=True, rows=4, n=300, shift=1000.0),
    Case("very negative values", why="exp(-1000) is 0 everywhere unless the maximum is subtracted", rows=4, n=300, shift=-1000.0),
    Case("equal elements", why="every element is 1 / n", rows=4, n=300, scale=0.0),
    Case("some -inf", why="masked elements must become exactly 0", small=True, rows=4, n=90, masked=0.5),
    Case("rows of -inf", why="a row that sees no key becomes 0, not NaN", small=True, rows=4, n=90, masked=1.0),
    Case("down the columns", why="dim 0: the elements of a row are a stride apart", rows=130, n=40, dim=0),
    Case("columns of different size", why="each column has a maximum of its own", small=True, rows=60, n=7, dim=0, apart=200.0),
    Case("rows of different size", why="each row has a maximum of its own", rows=7, n=300, apart=200.0),
    Case("a slice", why="rows further apart than they are long", rows=40, n=130, padding=7),
    Case("a batch", why="(batch, rows, n): one block per row of each matrix", small=True, batch=3, rows=5, n=37),
    Case("a batch, down the columns", why="dim -2: the elements of a row are a stride apart", small=True, batch=3, rows=37, n=5, dim=-2),
    Case("a batch, long columns", why="one past the block, in every column", batch=2, rows=257, n=40, dim=-2),
    Case("a batch of slices", why="matrices further apart than they are large", batch=4, rows=40, n=130, padding=7),
    Case("a batch of slices, down the columns", why="both at once", batch=4, rows=130, n=40, padding=7, dim=-2),
    Case("a transposed batch", why="the first stride is smaller than the second", small=True, batch=3, rows=4, n=50, transposed=True),
    Case("an output with gaps", why="out has strides of its own", small=True, batch=3, rows=4, n=50, gaps=True),
    Case("past 2^31 elements", why="offsets need 64 bits", batch=2, rows=3, n=50, far=True),
    Case("course size", why="the sizes of the handout", devices=("cuda",), batch=64, rows=128, n=1024),
    Case("course size, down the columns", why="the sizes of the handout", devices=("cuda",), batch=64, rows=1024, n=128, dim=-2),
]  # fmt: skip


@suite.check("softmax", SOFTMAX)
def softmax_matches_float64(case, device, rng):
    x = _softmax_input(case, rng)
    dim = case.values.get("dim", -1)
    other = -1 if dim in (0, -2) else -2

    def by_pytorch(x, dim=dim):
        return x.softmax(dim).nan_to_num(0.0)

    truth, pytorch = by_pytorch(x.double()), by_pytorch(x)  # first: a kernel could change x
    with _outputs(case, "out"), Watch() as did:
        got = attention.test_batched_softmax(x, dim)
    assert_close(
        got,
        truth,
        pytorch,
        axes=("batch", "row", "column")[-x.dim() :],
        suspects={
            NOT_ZERO.format("row of nothing but -inf"): lambda: x.double().softmax(dim),
            "the sum is over the other dimension": lambda: by_pytorch(x.double(), other),
            "the division by the sum is missing": lambda: (
                x.double() - x.double().amax(dim, True)
            ).exp(),
        },
    )
    did.expect({"task2 batched_softmax": 1}, memory=got.nbytes)


def _outputs(case, name):
    """The launcher's output has gaps between its rows where the case says so."""
    return strided_output(name) if case.values.get("gaps") else contextlib.nullcontext()


def _softmax_input(case, rng):
    """``(rows, n)``, or ``(batch, rows, n)`` where the case has a batch."""
    v = case.values
    shape = [case.batch] if "batch" in v else []
    shape += [case.rows, case.n + v.get("padding", 0)]
    if v.get("transposed"):
        shape[:2] = shape[1::-1]
    x = rng.randn(*shape, scale=v.get("scale", 3.0), shift=v.get("shift", 0.0))
    x.masked_fill_(rng.uniform(0, 1, *shape) < v.get("masked", 0.0), -torch.inf)
    x = x[..., : case.n]
    if apart := v.get("apart"):
        other = -1 if "dim" in v else -2
        x.transpose(other, -1).add_(apart * torch.arange(x.shape[other], device=x.device))
    if v.get("far"):
        return lay_out("far", *[x.unsqueeze(2)] * 3)[0].squeeze(2)
    return x.transpose(0, 1) if v.get("transposed") else x


GEMM = [
    Case("one element", why="the smallest product", small=True, batch=1, M=1, N=1, K=1),
    Case("exactly a tile", why="no ragged edge", small=True, batch=1, M=32, N=32, K=32),
    Case("one past a tile", why="ragged in all three dimensions", small=True, batch=2, M=33, N=34, K=35),
    Case("one short of a tile", why="ragged in all three dimensions", batch=2, M=31, N=63, K=95),
    Case("a row by a column", why="M and N of 1, long K", batch=100, M=1, N=1, K=250),
    Case("an outer product", why="K of 1", batch=1, M=70, N=65, K=1),
    Case("tall and thin", why="more row tiles than column tiles", batch=2, M=250, N=20, K=64),
    Case("head_dim 80", why="K not a power of two", batch=4, M=100, N=100, K=80),
    Case("strided rows", why="rows further apart than they are long", small=True, batch=2, M=40, N=33, K=20, layout="padded"),
    Case("transposed", why="the elements of a row are a stride apart", small=True, batch=2, M=40, N=33, K=35, layout="transposed"),
    Case("interleaved", why="(rows, batch, n) in memory, as the heads of a sequence are", small=True, batch=3, M=40, N=33, K=35, layout="interleaved"),
    Case("every other element", why="no stride is 1", batch=2, M=40, N=70, K=35, layout="spread"),
    Case("one matrix for all", why="expand() repeats a matrix with a stride of 0", batch=3, M=40, N=33, K=35, layout="expanded"),
    Case("a product with gaps", why="C has strides of its own", small=True, batch=2, M=33, N=34, K=5, gaps=True),
    Case("past 2^31 elements", why="offsets need 64 bits", batch=2, M=34, N=33, K=20, layout="far"),
    Case("course size", why="the sizes of the handout", devices=("cuda",), batch=4, M=1000, N=1000, K=1000),
]  # fmt: skip


def _matrices(case, rng, *shapes):
    return [_matrix(case, rng, *shape) for shape in shapes]


def _matrix(case, rng, m, n):
    """``(batch, m, n)`` in the case's layout."""
    match case.values.get("layout"):
        case "padded":
            return rng.randn(case.batch, m, n + 5)[:, :, :n]
        case "transposed":
            return rng.randn(case.batch, n, m).mT
        case "interleaved":
            return rng.randn(m, case.batch, n).transpose(0, 1)
        case "spread":
            return rng.randn(case.batch, 2 * m, 2 * n)[:, ::2, 1::2]
        case "expanded":
            return rng.randn(1, m, n).expand(case.batch, m, n)
        case "far":
            x = rng.randn(case.batch, m, 1, n)
            return lay_out("far", x, x, x)[0].squeeze(2)
    return rng.randn(case.batch, m, n)


@suite.check("gemm", GEMM)
def gemm_nt_matches_float64(case, device, rng):
    a, b = _matrices(case, rng, (case.M, case.K), (case.N, case.K))
    truth, pytorch = a.double() @ b.double().mT, a @ b.mT
    with _outputs(case, "C"), Watch() as did:
        got = attention.test_batched_GEMM_NT(a, b)
    assert_close(
        got,
        truth,
        pytorch,
        axes=("batch", "row", "column"),
        tile={"row": 32, "column": 32},
    )
    did.expect({"task2 batched_GEMM_NT": 1}, memory=got.nbytes)


@suite.check("gemm", GEMM)
def gemm_nn_matches_float64(case, device, rng):
    a, b = _matrices(case, rng, (case.M, case.K), (case.K, case.N))
    truth, pytorch = a.double() @ b.double(), a @ b
    with _outputs(case, "C"), Watch() as did:
        got = attention.test_batched_GEMM_NN(a, b)
    assert_close(
        got,
        truth,
        pytorch,
        axes=("batch", "row", "column"),
        tile={"row": 32, "column": 32},
    )
    did.expect({"task2 batched_GEMM_NN": 1}, memory=got.nbytes)


ATTENTION = [
    Case("one token", why="the output is v", small=True, batch=1, heads=1, q_len=1, head_dim=64),
    Case("ragged", why="33 rows: one past a tile", small=True, batch=2, heads=2, q_len=33, head_dim=16, causal=True),
    Case("not causal", why="every query sees every key", batch=2, heads=3, q_len=50, head_dim=64),
    Case("causal", why="query i sees i + 1 keys", batch=2, heads=3, q_len=100, head_dim=64, causal=True),
    Case("head_dim 80", why="not a power of two", batch=1, heads=2, q_len=65, head_dim=80, causal=True),
    Case("head_dim 128", why="the course's head_dim", batch=1, heads=2, q_len=64, head_dim=128),
    Case("more keys than queries", why="causal is aligned to the end", batch=1, heads=2, q_len=20, kv_len=70, head_dim=32, causal=True),
    Case("more queries than keys", why="the first queries see nothing and give 0", batch=1, heads=2, q_len=40, kv_len=25, head_dim=32, causal=True),
    Case("large scores", why="scores in the hundreds", batch=4, heads=8, q_len=40, head_dim=64, scale=10.0),
    Case("equal keys", why="every weight is 1 / kv_len", batch=1, heads=2, q_len=40, head_dim=64, scale=0.0),
    Case("slices of one qkv tensor", why="rows of q, k and v are 3 hidden_dim apart", small=True, batch=2, heads=2, q_len=40, head_dim=16, fused=True),
    Case("different strides", why="q, k and v each have strides of their own", small=True, batch=2, heads=2, q_len=20, kv_len=30, head_dim=16, layout="apart"),
    Case("an output with gaps", why="out has strides of its own", batch=2, heads=2, q_len=40, head_dim=16, gaps=True),
    Case("past 2^31 elements", why="offsets need 64 bits", batch=2, heads=2, q_len=20, head_dim=16, layout="far"),
    Case("very negative scores", why="scores of about -650: exp of each alone is 0, and a mask of -100 is none", batch=2, heads=8, q_len=40, head_dim=64, opposed=9.0, scale=0.2, causal=True),
    Case("course size", why="the sizes of the handout", devices=("cuda",), batch=8, heads=32, q_len=512, head_dim=128, causal=True),
]  # fmt: skip


@suite.check("attention", ATTENTION)
def attention_matches_float64(case, device, rng):
    v = case.values
    hidden, kv_len, causal = (
        case.heads * case.head_dim,
        v.get("kv_len", case.q_len),
        v.get("causal", False),
    )
    if v.get("fused"):
        q, k, value = rng.randn(case.batch, case.q_len, 3 * hidden).chunk(3, dim=-1)
    else:
        scale, shift = v.get("scale", 1.0), v.get("opposed", 0.0)
        q = rng.randn(case.batch, case.q_len, hidden, scale=scale, shift=shift)
        k = rng.randn(case.batch, kv_len, hidden, scale=scale, shift=-shift)
        value = rng.randn(case.batch, kv_len, hidden)
    if layout := v.get("layout"):
        q, k, value = (
            t.squeeze(2) for t in lay_out(layout, *(t.unsqueeze(2) for t in (q, k, value)))
        )
    heads = [t.unflatten(-1, (case.heads, case.head_dim)) for t in (q, k, value)]
    truth, pytorch = references(*heads, large_scores=v.get("scale", 1.0) > 1, causal=causal)
    with _outputs(case, "out"), Watch() as did:
        got = attention.custom_attention(q, k, value, case.heads, causal)
    assert_close(
        got.unflatten(-1, (case.heads, case.head_dim)),
        truth,
        pytorch,
        axes=("batch", "row", "head", "column"),
        suspects=mistakes(*heads, causal=causal),
    )
    scores = 4 * case.batch * case.heads * case.q_len * kv_len
    did.expect({"task2 custom_attention": 1}, memory=got.nbytes + scores)


LAYER = [
    Case("causal", why="projections around the kernels", batch=2, seq=40, heads=4, hidden=128, causal=True),
    Case("not causal", why="projections around the kernels", batch=1, seq=33, heads=2, hidden=64, causal=False),
]  # fmt: skip


@suite.check("attention", LAYER)
def layer_matches_float64(case, device, rng):
    weights = [rng.randn(case.hidden, case.hidden, scale=case.hidden**-0.5) for _ in range(4)]
    layer = attention.CustomSelfAttention(*weights, case.hidden, case.heads)

    def by(attend, x, weights, causal):
        q, k, v = ((x @ w.T).unflatten(-1, (case.heads, -1)) for w in weights[:3])
        return attend(q, k, v, causal=causal).flatten(2) @ weights[3].T

    # Twice: a layer that keeps a mask or scores from its first call is wrong in the second.
    for seq, causal in ((case.seq, case.causal), (case.seq - 7, not case.causal)):
        x = rng.randn(case.batch, seq, case.hidden)
        truth = by(attention_float64, x.double(), [w.double() for w in weights], causal)
        pytorch = by(attention_pytorch, x, weights, causal)
        with Watch() as did:
            got = layer(x, causal=causal)
        did.expect_written()
        assert_close(
            got,
            truth,
            pytorch,
            axes=("batch", "row", "column"),
        )
        did.expect({"task2 custom_attention": 1}, memory=None, torch_computes=True)


test_task2 = suite.pytest()

if __name__ == "__main__":
    suite.main()
