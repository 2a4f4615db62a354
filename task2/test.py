"""Task 2: your softmax and matrix products, then the attention made of them.

python -m task2.test [--softmax | --gemm | --attention] [--check]
"""

import torch

from common.check import Case, Suite, assert_close
from common.check.attention import attention_float64, attention_pytorch
from task2 import attention

suite = Suite(
    "task2",
    title="naive attention in CUDA",
    points=3,
    sources=("task2/attention.py", "task2/attention_kernel.cu"),
)

SOFTMAX = [
    Case("one element", why="the smallest input", small=True, rows=1, n=1),
    Case("shorter than the block", why="most threads have nothing to add", small=True, rows=3, n=37),
    Case("one past the block", why="one thread has two elements", small=True, rows=2, n=257),
    Case("long rows", why="each thread strides over the row", rows=64, n=3000),
    Case("many rows", why="the grid is the batch", rows=1000, n=100),
    Case("large values", why="exp(1000) overflows unless the maximum is subtracted", small=True, rows=4, n=300, shift=1000.0),
    Case("very negative values", why="exp(-1000) is 0 everywhere unless the maximum is subtracted", rows=4, n=300, shift=-1000.0),
    Case("equal elements", why="every element is 1 / n", rows=4, n=300, scale=0.0),
    Case("some -inf", why="masked elements must become exactly 0", small=True, rows=4, n=90, masked=0.5),
    Case("rows of -inf", why="a row that may look at nothing becomes 0, not NaN", small=True, rows=4, n=90, masked=1.0),
    Case("down the columns", why="dim 0: elements of a row lie apart", rows=130, n=40, dim=0),
    Case("a slice", why="rows further apart than they are long", rows=40, n=130, padding=7),
]  # fmt: skip


@suite.check("softmax", SOFTMAX)
def softmax_matches_float64(case, device, rng):
    v = case.values
    x = rng.randn(case.rows, case.n + v.get("padding", 0), scale=v.get("scale", 3.0)) + v.get(
        "shift", 0.0
    )
    x = x[:, : case.n]
    x = x.masked_fill(rng.uniform(0, 1, *x.shape) < v.get("masked", 0.0), -torch.inf)
    dim = v.get("dim", -1)
    truth = x.double().softmax(dim).nan_to_num(0.0)
    pytorch = x.softmax(dim).nan_to_num(0.0)
    assert_close(
        attention.test_batched_softmax(x, dim),
        truth,
        pytorch,
        axes=("row", "column"),
        suspects={
            "the sum is over the other dimension": lambda: (
                x.double().softmax(-1 - dim).nan_to_num(0.0)
            ),
            "the division by the sum is missing": lambda: (
                x.double() - x.double().amax(dim, True)
            ).exp(),
        },
    )


GEMM = [
    Case("one element", why="the smallest product", small=True, batch=1, M=1, N=1, K=1),
    Case("exactly a tile", why="no ragged edge", small=True, batch=1, M=32, N=32, K=32),
    Case("one past a tile", why="ragged in all three dimensions", small=True, batch=2, M=33, N=34, K=35),
    Case("one short of a tile", why="ragged in all three dimensions", batch=2, M=31, N=63, K=95),
    Case("a row by a column", why="M and N of 1, long K", batch=100, M=1, N=1, K=250),
    Case("an outer product", why="K of 1", batch=1, M=70, N=65, K=1),
    Case("tall and thin", why="more row tiles than column tiles", batch=2, M=250, N=20, K=64),
    Case("head_dim 80", why="K not a power of two", batch=4, M=100, N=100, K=80),
    Case("strided rows", why="rows further apart than they are long", small=True, batch=2, M=40, N=33, K=20, padding=5),
    Case("course size", why="the sizes of the handout", devices=("cuda",), batch=4, M=1000, N=1000, K=1000),
]  # fmt: skip


def _matrices(case, rng, *shapes):
    padding = case.values.get("padding", 0)
    return [rng.randn(case.batch, m, n + padding)[:, :, :n] for m, n in shapes]


@suite.check("gemm", GEMM)
def gemm_nt_matches_float64(case, device, rng):
    a, b = _matrices(case, rng, (case.M, case.K), (case.N, case.K))
    assert_close(
        attention.test_batched_GEMM_NT(a, b),
        a.double() @ b.double().mT,
        a @ b.mT,
        axes=("batch", "row", "column"),
        tile={"row": 32, "column": 32},
    )


@suite.check("gemm", GEMM)
def gemm_nn_matches_float64(case, device, rng):
    a, b = _matrices(case, rng, (case.M, case.K), (case.K, case.N))
    assert_close(
        attention.test_batched_GEMM_NN(a, b),
        a.double() @ b.double(),
        a @ b,
        axes=("batch", "row", "column"),
        tile={"row": 32, "column": 32},
    )


ATTENTION = [
    Case("one token", why="the output is v", small=True, batch=1, heads=1, q_len=1, head_dim=64),
    Case("ragged", why="33 rows: one past a tile", small=True, batch=2, heads=2, q_len=33, head_dim=16, causal=True),
    Case("not causal", why="every query sees every key", batch=2, heads=3, q_len=50, head_dim=64),
    Case("causal", why="query i sees i + 1 keys", batch=2, heads=3, q_len=100, head_dim=64, causal=True),
    Case("head_dim 80", why="not a power of two", batch=1, heads=2, q_len=65, head_dim=80, causal=True),
    Case("head_dim 128", why="the course's head_dim", batch=1, heads=2, q_len=64, head_dim=128),
    Case("more keys than queries", why="causal is aligned to the end", batch=1, heads=2, q_len=20, kv_len=70, head_dim=32, causal=True),
    Case("more queries than keys", why="the first queries see nothing and give 0", batch=1, heads=2, q_len=40, kv_len=25, head_dim=32, causal=True),
    Case("large scores", why="scores in the hundreds", batch=1, heads=2, q_len=40, head_dim=64, scale=10.0),
    Case("equal keys", why="every weight is 1 / kv_len", batch=1, heads=2, q_len=40, head_dim=64, scale=0.0),
    Case("slices of one qkv tensor", why="rows of q, k and v lie 3 hidden_dim apart", small=True, batch=2, heads=2, q_len=40, head_dim=16, fused=True),
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
        scale = v.get("scale", 1.0)
        q = rng.randn(case.batch, case.q_len, hidden, scale=scale)
        k = rng.randn(case.batch, kv_len, hidden, scale=scale)
        value = rng.randn(case.batch, kv_len, hidden)
    heads = [t.unflatten(-1, (case.heads, case.head_dim)) for t in (q, k, value)]
    got = attention.custom_attention(q, k, value, case.heads, causal)
    assert_close(
        got.unflatten(-1, (case.heads, case.head_dim)),
        attention_float64(*heads, causal=causal),
        attention_pytorch(*heads, causal=causal),
        axes=("batch", "row", "head", "column"),
        suspects={
            "the causal mask is ignored": lambda: attention_float64(*heads),
            "the scores are not scaled": lambda: attention_float64(
                *heads, causal=causal, scale=1.0
            ),
        },
    )


LAYER = [
    Case(
        "causal",
        why="projections around the kernels",
        batch=2,
        seq=40,
        heads=4,
        hidden=128,
        causal=True,
    ),
    Case(
        "not causal",
        why="projections around the kernels",
        batch=1,
        seq=33,
        heads=2,
        hidden=64,
        causal=False,
    ),
]


@suite.check("attention", LAYER)
def layer_matches_float64(case, device, rng):
    weights = [rng.randn(case.hidden, case.hidden, scale=case.hidden**-0.5) for _ in range(4)]
    layer = attention.CustomSelfAttention(*weights, case.hidden, case.heads)
    x = rng.randn(case.batch, case.seq, case.hidden)

    def by(attend, x, weights):
        q, k, v = ((x @ w.T).unflatten(-1, (case.heads, -1)) for w in weights[:3])
        return attend(q, k, v, causal=case.causal).flatten(2) @ weights[3].T

    assert_close(
        layer(x, causal=case.causal),
        by(attention_float64, x.double(), [w.double() for w in weights]),
        by(attention_pytorch, x, weights),
        axes=("batch", "row", "column"),
    )


test_task2 = suite.pytest()

if __name__ == "__main__":
    suite.main()
