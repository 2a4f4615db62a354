"""Task 3: your tiled attention in PyTorch, checked against float64.

python -m task3.test [--attention | --causal | --layer]
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from common.check import AttentionCase, Case, Rng, Suite, Watch, assert_close, written_out
from common.check.attention import (
    attention_float64,
    attention_pytorch,
    mistakes,
    online_softmax_mistakes,
)
from task3.attention import CustomFlashAttention, flash_attention

suite = Suite(
    "task3",
    title="FlashAttention-2 in PyTorch",
    sources=("task3/attention.py", "common/layer.py"),
)

AXES = ("batch", "row", "head", "column")


@dataclass(frozen=True, kw_only=True, repr=False)
class TileCase(AttentionCase):
    """An attention in tiles.

    Args:
        B_r, B_c: rows and columns of a tile.
        equal_keys: all keys are the first one.
        ramp: 1: the scores grow with the key, -1: they fall.
        first: a key where tiles of rows and of columns begin.
    """

    head_dim: int = 16
    heads: int = 3
    B_r: int = 16
    B_c: int = 16
    equal_keys: bool = False
    ramp: int = 0
    first: int = 32

    def numbers(self, rng: Rng) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().numbers(rng)
        if self.equal_keys:
            k = k[:, :1].repeat(1, self.kv_len, 1, 1)
        if self.ramp:
            # All entries are positive, and grow (fall) with the key: so do the scores.
            steps = torch.linspace(0.1, 1.5, self.kv_len, device=k.device)
            steps = steps if self.ramp > 0 else steps.flip(0)
            q, k = q.abs(), k.abs() * steps[:, None, None]
        return q, k, v


LONG = dict(q_len=8, kv_len=4096, batch=1, heads=1, B_r=8, B_c=4)
CASES = [
    TileCase("one tile", why="no rescale yet", q_len=16),
    TileCase("exact tiles", why="two by two tiles, none ragged", q_len=32),
    TileCase("one token", why="a single row and a single column", q_len=1),
    TileCase("one past a tile", why="the last tile is one row and one column", q_len=33),
    TileCase("ragged", why="no size is a multiple of another", q_len=37, B_r=8, B_c=5),
    TileCase("tiles larger than all", why="B_r and B_c beyond the lengths", q_len=20, B_r=64, B_c=128),
    TileCase("tall tiles", why="B_r > B_c: several columns of tiles on the diagonal", q_len=70, B_r=32, B_c=8),
    TileCase("wide tiles", why="B_r < B_c: several rows of tiles on the diagonal", q_len=70, B_r=8, B_c=32),
    TileCase("tiles of one", why="each key is a tile: online softmax alone", q_len=9, B_r=1, B_c=1),
    TileCase("fewer queries", why="a chunk of queries on a longer cache", q_len=19, kv_len=45),
    TileCase("one query", why="decoding: it sees every key", q_len=1, kv_len=45),
    TileCase("more queries", why="causal rows that see no key give 0", q_len=45, kv_len=19),
    TileCase("head_dim 80", why="a width that is no power of two", q_len=40, head_dim=80),
    TileCase("one sequence, one head", why="dimensions of size 1 must not disappear", q_len=40, batch=1, heads=1),
    TileCase("long", why="17 tiles per row, the last one ragged", q_len=260, batch=1, B_c=16, B_r=64),
    TileCase("large magnitudes", why="exp overflows unless the maximum is subtracted", q_len=40, magnitude=8.0),
    TileCase("equal rows", why="every key has the same weight", q_len=40, equal_keys=True),
    TileCase("rising scores", why="each tile raises the maximum: all is rescaled", q_len=64, ramp=1),
    TileCase("falling scores", why="the first tile has the maximum: nothing is rescaled", q_len=64, ramp=-1),
    TileCase("strided q, k, v", why="slices of one tensor, as a fused projection gives", q_len=40, layout="fused"),
    TileCase("different strides", why="q, k and v each have strides of their own", q_len=40, kv_len=50, layout="apart"),
    TileCase("very negative scores", why="scores of about -650: exp of each alone is 0", heads=8, q_len=40, head_dim=64, opposed=9.0, magnitude=0.2),
    TileCase("float16, products above 65504", why="q k^T does not fit float16", q_len=40, head_dim=64, magnitude=60.0, dtype=torch.float16),
    TileCase("float64", why="no step may fall back to float32", q_len=37, dtype=torch.float64),
    TileCase("bfloat16", why="sums kept in it stop growing", **LONG, dtype=torch.bfloat16),
    TileCase("float16", why="sums kept in it lose two digits", **LONG, dtype=torch.float16),
]  # fmt: skip


@suite.check("attention", CASES, kernels=False)
def attention_matches_float64(case: TileCase, device: torch.device, rng: Rng) -> None:
    compare(case, rng, causal=False)


@suite.check("causal", CASES, kernels=False)
def causal_attention_matches_float64(case: TileCase, device: torch.device, rng: Rng) -> None:
    compare(case, rng, causal=True)


@suite.check(
    "attention",
    [
        TileCase(
            "512 tokens",
            why="S x S would be 64 times as large as q",
            q_len=512,
            batch=1,
            heads=1,
            head_dim=8,
        ),
        TileCase(
            "512 keys",
            why="a strip of B_r x kv_len is larger than a tile, too",
            q_len=16,
            kv_len=512,
            batch=1,
            heads=1,
            head_dim=2,
        ),
    ],  # fmt: skip
    kernels=False,
)
def no_tensor_is_larger_than_a_tile(case: TileCase, device: torch.device, rng: Rng) -> None:
    q, k, v = flat_qkv(case, rng)
    for causal in (False, True):
        with Watch() as did:
            flash_attention(q, k, v, case.heads, case.B_r, case.B_c, causal)
        # q, k or a tile
        did.expect_small(q.element_size() * max(q.numel(), k.numel(), case.B_r * case.B_c))


@suite.check(
    "causal",
    [
        TileCase("square tiles", why="tile (i, j) with j > i is fully masked", q_len=64),
        TileCase("ragged", why="the last tile is partial", q_len=59),
        TileCase("tall tiles", why="B_r > B_c", q_len=64, B_r=32, B_c=8),
        TileCase("wide tiles", why="B_r < B_c", q_len=64, B_r=8, B_c=32),
        TileCase(
            "fewer queries", why="the diagonal starts further right", q_len=32, kv_len=64, first=48
        ),
    ],
    kernels=False,
)
def tiles_above_the_diagonal_are_skipped(case: TileCase, device: torch.device, rng: Rng) -> None:
    # NaN in V reaches every row whose tile is computed, even where P is 0: 0 * NaN is NaN.
    q, k, v = flat_qkv(case, rng)
    clean = flash_attention(q, k, v, case.heads, case.B_r, case.B_c, causal=True)
    first = case.first
    k[:, first:], v[:, first:] = torch.nan, torch.nan
    got = flash_attention(q, k, v, case.heads, case.B_r, case.B_c, causal=True)
    rows = first - (case.kv_len - case.q_len)  # the rows before this one see none of those keys
    same = (got[:, :rows] == clean[:, :rows]).all(dim=-1).all(dim=0)
    assert bool(same.all()), (
        f"keys {first} and after are above the diagonal for rows 0 to {rows - 1}, so their tiles should be"
        f" skipped; but NaN there reaches the rows {(~same).nonzero().flatten().tolist()}"
    )


LAYER_CASES = [
    Case("one tile", why="everything small and even", batch=2, seq=16, heads=4, d=8),
    Case(
        "several tiles",
        why="more tokens than a tile of any size has",
        batch=1,
        seq=150,
        heads=2,
        d=16,
    ),
    Case("one token", why="what a model starts from", batch=3, seq=1, heads=2, d=32),
]


@suite.check("layer", LAYER_CASES, kernels=False)
def layer_matches_float64(case: Case, device: torch.device, rng: Rng) -> None:
    width = case.heads * case.d
    weights = [rng.randn(width, width, scale=width**-0.5) for _ in range(4)]
    layer = CustomFlashAttention(*weights, width, case.heads)
    assert set(layer.state_dict()) == {"w_qkv", "w_o"}, "the weights are not in state_dict()"
    heads = (case.heads, case.d)

    def through(attention: Callable[..., Tensor], causal: bool, dtype: torch.dtype) -> Tensor:
        w_q, w_k, w_v, w_o = (w.to(dtype) for w in weights)
        q, k, v = ((x.to(dtype) @ w.T).unflatten(-1, heads) for w in (w_q, w_k, w_v))
        return attention(q, k, v, causal=causal).flatten(2) @ w_o.T

    # A layer that keeps a mask from its first call is wrong in a later one.
    for seq, causal in ((case.seq, False), (case.seq, True), (case.seq + 5, True)):
        x = rng.randn(case.batch, seq, width)
        # First: the layer shares the weights, and must not change what it is compared with.
        truth = through(attention_float64, causal, torch.float64)
        pytorch = through(attention_pytorch, causal, torch.float32)
        assert_close(
            layer(x, causal=causal),
            truth,
            pytorch,
            axes=("batch", "row", "column"),
            suspects={
                "causal is not passed on": lambda c=causal: through(
                    attention_float64, not c, torch.float64
                )
            },
        )


@suite.check(
    "attention",
    [
        Case("width of k", why="not that of q", k=(2, 8, 40), message="k must be"),
        Case("length of v", why="not that of k", v=(2, 9, 48), message="v must be"),
        Case("rank", why="a sequence without its batch", q=(8, 48), message="q must be"),
        Case("dtype of v", why="float64 among float32", v_dtype=torch.float64, message="v must be"),
        Case("heads", why="5 heads do not divide 48", heads=5, message="multiple of num_heads"),
        Case("B_r 0", why="a tile needs a row", B_r=0, message="at least 1"),
        Case("B_c 0", why="a tile needs a column", B_c=0, message="at least 1"),
    ],
    kernels=False,
)
def wrong_input_is_refused(case: Case, device: torch.device, rng: Rng) -> None:
    given = {"q": (2, 8, 48), "k": (2, 8, 48), "v": (2, 8, 48), "heads": 3, "B_r": 4, "B_c": 4}
    given |= case.values
    q, k, v = (rng.randn(*given[name]) for name in "qkv")
    v = v.to(case.values.get("v_dtype", torch.float32))
    good = rng.randn(2, 8, 48)
    flash_attention(good, good, good, 3)  # a stub fails here, not as a refusal below
    try:
        flash_attention(q, k, v, given["heads"], given["B_r"], given["B_c"])
    except ValueError as error:
        assert case.message in str(error), f"the error should say '{case.message}': {error}"
    else:
        raise AssertionError("this was accepted")


def compare(case: TileCase, rng: Rng, *, causal: bool) -> None:
    """flash_attention against float64, with PyTorch's own attention saying what the dtype loses."""
    q, k, v = flat_qkv(case, rng)
    kept = [t.clone() for t in (q, k, v)]
    with written_out():
        got = flash_attention(q, k, v, case.heads, case.B_r, case.B_c, causal)
    assert all(map(torch.equal, (q, k, v), kept)), "q, k or v was changed"
    q, k, v = (t.unflatten(-1, (case.heads, -1)) for t in (q, k, v))
    narrow = torch.float32 if case.dtype == torch.float64 else case.dtype
    assert_close(
        got.unflatten(-1, (case.heads, -1)),
        attention_float64(q, k, v, causal=causal),
        attention_pytorch(*(t.to(narrow) for t in (q, k, v)), causal=causal),
        axes=AXES,
        tile={"row": case.B_r},
        suspects=suspects(q, k, v, case.B_c, causal),
        dtype=case.dtype,
    )


def flat_qkv(case: TileCase, rng: Rng) -> list[Tensor]:
    """q, k, v ``(batch, length, heads * head_dim)`` as the case describes them."""
    return [t.flatten(2) for t in case.qkv(rng)]


def suspects(
    q: Tensor, k: Tensor, v: Tensor, B_c: int, causal: bool
) -> dict[str, Callable[[], Tensor]]:
    """What comes out when one step is wrong; computed only after a failure."""
    found = mistakes(q, k, v, causal=causal) | online_softmax_mistakes(q, k, v, B_c, causal=causal)
    if not causal:
        found["the causal mask is applied unasked"] = lambda: attention_float64(
            q, k, v, causal=True
        )
    return found


test_task3 = suite.pytest()

if __name__ == "__main__":
    suite.main()
