"""Task 1: your attention, checked against torch.nn.MultiheadAttention with the same weights.

python -m task1.test [--attention | --causal]
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from common.check import Case, Rng, Suite, assert_close, written_out
from common.check.attention import FLOAT16_OVERFLOWS
from task1.attention import CustomSelfAttention

suite = Suite(
    "task1",
    title="naive multi-head attention in PyTorch",
    sources=("task1/attention.py", "common/layer.py"),
)

AXES = ("batch", "row", "column")
ONE = {"batch": 2, "seq": 17, "heads": 4, "head_dim": 16, "dtype": torch.float32}

CASES = [
    Case("a first look", why="everything small and even", **ONE | {"seq": 16}),
    Case("one token", why="softmax over a single key gives 1, so o is v", **ONE | {"seq": 1}),
    Case(
        "ragged", why="no size is a power of two", **ONE | {"batch": 3, "seq": 37, "head_dim": 20}
    ),
    Case("one sequence", why="batch 1 must not lose its dimension", **ONE | {"batch": 1}),
    Case("one head", why="splitting into heads then changes nothing", **ONE | {"heads": 1}),
    Case(
        "many heads", why="more heads than tokens", **ONE | {"heads": 24, "seq": 7, "head_dim": 4}
    ),
    Case("heads of width 1", why="head_dim 1: the scale is 1", **ONE | {"head_dim": 1, "heads": 8}),
    Case("long", why="sums over 300 keys", **ONE | {"seq": 300, "batch": 1, "head_dim": 64}),
    Case(
        "large magnitudes", why="exp overflows unless the maximum is subtracted", **ONE, scale=12.0
    ),
    Case(
        "equal rows", why="all scores equal: every key gets the same weight", **ONE, equal_rows=True
    ),
    Case("strided x", why="x is a slice of a larger tensor and transposed", **ONE, strided=True),
    Case(
        "separate weights",
        why="w_q, w_k and w_v need not be slices of one tensor",
        **ONE,
        separate=True,
    ),
    Case(
        "very negative scores",
        why="scores of about -500: exp of each alone is 0, and a mask of -100 is none",
        **ONE | {"head_dim": 64},
        equal_keys=True,
        pair=-1,
        scale=11.0,
    ),
    Case("float64", why="no step may fall back to float32", **ONE | {"dtype": torch.float64}),
    Case("bfloat16", why="the dtype of large models", **ONE | {"dtype": torch.bfloat16}),
    Case("float16", why="numbers above 65504 do not exist", **ONE | {"dtype": torch.float16}),
    Case(
        "float16, products above 65504",
        why="q k^T does not fit float16, S = q k^T / sqrt(d) does",
        **ONE | {"dtype": torch.float16, "head_dim": 64},
        pair=1,
        scale=48.0,
    ),
]


@suite.check("attention", CASES, kernels=False)
def attention_matches_multihead_attention(case: Case, device: torch.device, rng: Rng) -> None:
    compare(case, device, rng, causal=False)


@suite.check("causal", CASES, kernels=False)
def causal_attention_matches_multihead_attention(
    case: Case, device: torch.device, rng: Rng
) -> None:
    compare(case, device, rng, causal=True)


@suite.check(
    "causal",
    [Case("a changed future", why="what comes after a token must not reach it", **ONE)],
    kernels=False,
)
def later_tokens_do_not_matter(case: Case, device: torch.device, rng: Rng) -> None:
    layer = make_layer(make_mha(case, rng))
    x = make_x(case, rng)
    before = layer(x, causal=True)
    x[:, 9:] = rng.randn(case.batch, case.seq - 9, hidden(case))
    after = layer(x, causal=True)
    changed = (before != after).any(dim=-1).any(dim=0).nonzero().flatten().tolist()
    assert not [row for row in changed if row < 9], (
        f"tokens 9 to {case.seq - 1} were changed, and with them the outputs of tokens {changed}"
    )


@suite.check(
    "causal",
    [Case("one layer, many calls", why="a mask kept from the first call is wrong later", **ONE)],
    kernels=False,
)
def calls_do_not_depend_on_earlier_ones(case: Case, device: torch.device, rng: Rng) -> None:
    mha = make_mha(case, rng)
    layer = make_layer(mha)
    for seq, causal in ((case.seq, True), (9, True), (case.seq, False), (40, True), (9, False)):
        x = rng.randn(case.batch, seq, hidden(case))
        truth, pytorch = float64_attention(mha, x, causal), reference(mha, x, causal)
        assert_close(
            layer(x, causal=causal),
            truth,
            pytorch,
            axes=AXES,
            suspects=suspects(mha, x, causal),
        )


@suite.check(
    "attention",
    [Case("to float64", why="weights outside of the module would stay in float32", **ONE)],
    kernels=False,
)
def weights_are_part_of_the_module(case: Case, device: torch.device, rng: Rng) -> None:
    mha = make_mha(case, rng)
    layer = make_layer(mha)
    assert set(layer.state_dict()) == {"w_qkv", "w_o"}, (
        f"state_dict() should hold w_qkv and w_o; it holds {sorted(layer.state_dict())}"
    )
    x = make_x(case, rng)
    truth, pytorch = float64_attention(mha, x, causal=False), reference(mha, x, causal=False)
    got = layer.to(torch.float64)(x.double())
    assert_close(got, truth, pytorch, axes=AXES, dtype=torch.float64)


@suite.check(
    "attention",
    [
        Case("rank", why="a sequence without its batch", **ONE, shape=(17, 64)),
        Case("width", why="not the layer's hidden_dim", **ONE, shape=(2, 17, 60)),
        Case("dtype", why="float64 numbers in a float32 layer", **ONE, given=torch.float64),
    ],
    kernels=False,
)
def wrong_input_is_refused(case: Case, device: torch.device, rng: Rng) -> None:
    layer = make_layer(make_mha(case, rng))
    x = rng.randn(
        *case.values.get("shape", (2, 17, 64)), dtype=case.values.get("given", torch.float32)
    )
    try:
        layer(x)
    except ValueError as error:
        assert "x must be" in str(error), f"the error should say what x must be; it says: {error}"
    else:
        raise AssertionError(f"x of shape {tuple(x.shape)} and dtype {x.dtype} was accepted")


def compare(case: Case, device: torch.device, rng: Rng, *, causal: bool) -> None:
    """The layer against float64, with nn.MultiheadAttention saying what the dtype loses."""
    mha = make_mha(case, rng)
    x = make_x(case, rng)
    kept = x.clone()
    layer = make_layer(mha, separate=case.values.get("separate", False))
    # float64 loses what float32 does, scaled.
    narrow = torch.float32 if case.dtype == torch.float64 else case.dtype
    # First: the layer may share the weights, and must not change what it is compared with.
    truth = float64_attention(mha, x, causal)
    pytorch = reference(copy.deepcopy(mha).to(narrow), x.to(narrow), causal)
    with written_out():
        got = layer(x, causal=causal)
    assert torch.equal(x, kept), "x was changed"
    assert_close(
        got,
        truth,
        pytorch,
        axes=AXES,
        suspects=suspects(mha, x, causal),
        dtype=case.dtype,
    )


def make_mha(case: Case, rng: Rng) -> nn.MultiheadAttention:
    """PyTorch's layer, with weights of a size that keeps activations near 1.

    They require gradients, as PyTorch makes them: otherwise its matmul takes another path, which rounds q, k and v
    differently, and with large magnitudes one near tie between two scores decides the comparison.
    """
    n = hidden(case)
    mha = nn.MultiheadAttention(
        n, case.heads, bias=False, batch_first=True, device=rng.device, dtype=case.dtype
    )
    with torch.no_grad():
        mha.in_proj_weight.copy_(rng.randn(3 * n, n, dtype=case.dtype, scale=n**-0.5))
        if case.values.get(
            "equal_keys"
        ):  # q and k see one half of x, which is the same in all rows
            mha.in_proj_weight[: 2 * n, n // 2 :] = 0
        if pair := case.values.get("pair"):  # each k is q, or -q
            mha.in_proj_weight[n : 2 * n] = pair * mha.in_proj_weight[:n]
        mha.out_proj.weight.copy_(rng.randn(n, n, dtype=case.dtype, scale=n**-0.5))
    return mha


def make_layer(mha: nn.MultiheadAttention, *, separate: bool = False) -> CustomSelfAttention:
    """Your layer on PyTorch's weights; ``separate``: on copies of its w_q, w_k and w_v."""
    weights = mha.in_proj_weight.chunk(3)
    if separate:
        weights = [w.clone() for w in weights]
    return CustomSelfAttention(*weights, mha.out_proj.weight, mha.embed_dim, mha.num_heads)


def make_x(case: Case, rng: Rng) -> Tensor:
    """The input ``(batch, seq, hidden)`` that the case describes."""
    scale = case.values.get("scale", 1.0)
    shape = (case.batch, case.seq, hidden(case))
    if case.values.get("strided"):
        wide = rng.randn(shape[1], 2 * shape[0], shape[2] + 3, dtype=case.dtype)
        return wide[:, ::2, 2:-1].transpose(0, 1)
    x = rng.randn(*shape, dtype=case.dtype, scale=scale)
    if case.values.get("equal_keys"):
        x[..., : shape[2] // 2] = x[:, :1, : shape[2] // 2]
    return x[:, :1].repeat(1, case.seq, 1) if case.values.get("equal_rows") else x


def hidden(case: Case) -> int:
    """hidden_dim of the case."""
    return case.heads * case.head_dim


def reference(mha: nn.MultiheadAttention, x: Tensor, causal: bool) -> Tensor:
    """The same by nn.MultiheadAttention, in the dtype of x."""
    seq = x.shape[1]
    after = torch.ones(seq, seq, dtype=torch.bool, device=x.device).triu(diagonal=1)
    with torch.no_grad():
        return mha(x, x, x, attn_mask=after if causal else None, need_weights=False)[0]


def float64_attention(
    mha: nn.MultiheadAttention,
    x: Tensor,
    causal: bool,
    *,
    heads: int | None = None,
    scale: float | None = None,
    softmax_dim: int = -1,
    overflow: bool = False,
    diagonal: int = 1,
    mask_last: bool = False,
    mixed: bool = False,
    output: bool = True,
    transposed: bool = False,
) -> Tensor:
    """The definition in float64; the keywords are the mistakes that people make."""
    weights = [w.detach().double() for w in (*mha.in_proj_weight.chunk(3), mha.out_proj.weight)]
    w_q, w_k, w_v, w_o = (w.T for w in weights) if transposed else weights
    split = (heads or mha.num_heads, -1)
    q, k, v = ((x.double() @ w.T).unflatten(-1, split).transpose(1, 2) for w in (w_q, w_k, w_v))
    S = q @ k.transpose(-1, -2)
    if overflow:
        S = S.where(S.abs() < FLOAT16_OVERFLOWS, S.sign() * torch.inf)
    S = S * (mha.head_dim**-0.5 if scale is None else scale)
    after = torch.ones_like(S, dtype=torch.bool).triu(diagonal) & causal
    P = torch.softmax(S if mask_last else S.masked_fill(after, -torch.inf), dim=softmax_dim)
    o = (P.masked_fill(after, 0) if mask_last else P) @ v  # (batch, heads, seq, head_dim)
    o = o.reshape(x.shape) if mixed else o.transpose(1, 2).flatten(2)  # (batch, seq, hidden)
    return o @ w_o.T if output else o


def suspects(
    mha: nn.MultiheadAttention, x: Tensor, causal: bool
) -> dict[str, Callable[[], Tensor]]:
    """What comes out when one step is wrong; computed only after a failure."""

    def with_mistake(causal: bool = causal, **mistake: object) -> Callable[[], Tensor]:
        return lambda: float64_attention(mha, x, causal, **mistake)  # type: ignore[arg-type]

    mask = "the causal mask is missing" if causal else "the causal mask is applied unasked"
    found = {
        "the scale 1 / sqrt(head_dim) is missing": with_mistake(scale=1.0),
        "the scale is 1 / head_dim": with_mistake(scale=1 / mha.head_dim),
        "the scale is 1 / sqrt(hidden_dim)": with_mistake(scale=mha.embed_dim**-0.5),
        "the heads are not separated": with_mistake(heads=1),
        "the heads are put side by side without going back to (batch, seq, heads, head_dim)": (
            with_mistake(mixed=True)
        ),
        "the softmax is over the rows, not over the columns of S": with_mistake(softmax_dim=-2),
        "the output projection w_o is missing": with_mistake(output=False),
        "the weights are applied transposed": with_mistake(transposed=True),
    }
    found[mask] = with_mistake(causal=not causal)
    if causal:
        found["the causal mask is off by one: a token does not see itself"] = with_mistake(
            diagonal=0
        )
        found["the causal mask is off by one: a token sees the next one"] = with_mistake(diagonal=2)
        found["the mask is applied after the softmax"] = with_mistake(mask_last=True)
    if x.dtype == torch.float16:
        found["q k^T overflows float16: scale q first"] = with_mistake(overflow=True)
    return found


test_task1 = suite.pytest()

if __name__ == "__main__":
    suite.main()
