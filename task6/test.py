"""Task 6: a dummy language model: prefill, decode, and how long each takes.

python -m task6.test [--prefill] [--decode] [--generate] [--check]
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from torch.nn import functional as F

from common.build import Arguments, Kernels, observing
from common.check import FACTOR, Case, CheckFailed, Suite, Watch, assert_close
from common.check.poison import hide_
from common.memory import free_memory, gib, require_memory
from common.timing import Backend, Benchmark, Timing, measure, sdpa
from task5.attention import choose_num_splits, sm_count
from task6.model import MLP_FACTOR, KVCache, customModel, generate, memory_needed
from task6.rope import RoPE, apply_rotary_emb

suite = Suite(
    "task6",
    title="a dummy LLM: prefill and decode",
    sources=(
        "task6/attention.py",
        "task6/model.py",
        "task6/rope.py",
        "task4/attention_kernel.cu",
        "task4/prefill.py",
        "task5/attention_kernel.cu",
    ),
)

AXES = ("batch", "position", "vocabulary")


# ---- a plain PyTorch model with the same weights


def plain_logits(
    model: customModel,
    tokens: Tensor,
    dtype: torch.dtype,
    *,
    pairs: str = "halves",
    positions: Tensor | None = None,
    seen: Tensor | None = None,
    rotate: str = "qk",
) -> Tensor:
    """Logits ``(batch, seq, vocab)`` of all tokens at once, in ``dtype``: no cache, no kernel, RoPE as complex numbers.

    ``pairs``, ``positions`` (seq,), ``seen`` (seq, seq) and ``rotate``, to which of q, k and v RoPE is applied, are for
    the mistakes that people make.
    """
    weights = model.state_dict()

    def weight(name: str) -> Tensor:  # converted at its use: no second copy of a large model
        return weights[name + ".weight"].to(dtype)

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight(name)

    seq = tokens.shape[1]
    if positions is None:
        positions = torch.arange(seq, device=tokens.device)
    if seen is None:
        seen = torch.ones(seq, seq, dtype=torch.bool, device=tokens.device).tril()
    x = weight("embedding")[tokens]  # (batch, seq, hidden)
    for i in range(model.num_layers):
        layer = f"layers.{i}."
        qkv = norm(x, layer + "attention_norm") @ weight(layer + "attention.qkv_proj").mT
        parts = qkv.unflatten(-1, (3, model.num_heads, -1)).unbind(2)
        qkv = dict(zip("qkv", parts, strict=True))  # (batch, seq, heads, head_dim)
        for name in rotate:
            qkv[name] = rotated(qkv[name], positions, pairs)
        q, k, v = (t.transpose(1, 2) for t in qkv.values())
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2)
        x = x + o @ weight(layer + "attention.o_proj").mT
        h = norm(x, layer + "mlp_norm")
        inner = F.silu(h @ weight(layer + "mlp.gate").mT) * (h @ weight(layer + "mlp.up").mT)
        x = x + inner @ weight(layer + "mlp.down").mT
    return norm(x, "norm") @ weight("lm_head").mT


def rotated(x: Tensor, positions: Tensor, pairs: str = "halves", base: float = 10000) -> Tensor:
    """RoPE as in the paper: a pair is a complex number, multiplied by ``e^(i position base^(-2 pair / d))``.

    x ``(batch, seq, heads, head_dim)``; ``pairs``: "halves", "neighbours", or "none" for no rotation.
    """
    if pairs == "none":
        return x
    half = x.shape[-1] // 2
    frequency = base ** -(torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angle = positions.double()[:, None, None] * frequency  # (seq, 1, head_dim / 2)
    turn = torch.polar(torch.ones_like(angle), angle)
    wide = torch.promote_types(x.dtype, torch.float32)  # there are no complex bfloat16 numbers
    turn = turn.to(torch.complex128 if wide == torch.float64 else torch.complex64)
    if pairs == "neighbours":
        z = torch.view_as_complex(x.to(wide).unflatten(-1, (half, 2)).contiguous()) * turn
        return torch.view_as_real(z).flatten(-2).to(x.dtype)
    z = torch.complex(*x.to(wide).chunk(2, dim=-1)) * turn
    return torch.cat((z.real, z.imag), dim=-1).to(x.dtype)


# ---- RoPE

ROPE = [
    Case("from the start", why="positions 0, 1, 2 ...", seq=33, pos=0, head_dim=64),
    Case("one position", why="what a decode step rotates", seq=1, pos=1023, head_dim=64),
    Case("an odd number", why="a chunk from the middle", seq=17, pos=100, head_dim=128),
    Case("the end of the table", why="large angles: float32 ones would be off", seq=5, pos=8187, head_dim=80),
    Case("the smallest head", why="a single pair", seq=9, pos=3, head_dim=2),
    Case("another base", why="base is a parameter", seq=9, pos=50, head_dim=32, base=500000),
    Case("a slice", why="q and k are slices of one wide tensor", seq=9, pos=5, head_dim=32, wide=True),
    Case("bfloat16", why="the dtype of large models", seq=20, pos=900, head_dim=64, dtype=torch.bfloat16),
]  # fmt: skip


@suite.check("prefill", ROPE, kernels=False)
def rope_matches_complex_numbers(case, device, rng):
    v = case.values
    base, dtype, d = v.get("base", 10000), v.get("dtype", torch.float32), case.head_dim
    x = rng.randn(2, case.seq, 3, d + (7 if v.get("wide") else 0), dtype=dtype)[..., :d]
    cos, sin = RoPE(d, base=base, device=device, dtype=dtype)(case.seq, case.pos)
    positions = torch.arange(case.pos, case.pos + case.seq, device=device)
    assert_close(
        apply_rotary_emb(x, cos, sin),
        rotated(x.double(), positions, base=base),
        _rope_by_pytorch(x, positions, base),
        axes=("batch", "position", "head", "element"),
        suspects={
            "the pairs are neighbours": lambda: rotated(x.double(), positions, "neighbours", base),
            "the rotation goes the other way": lambda: rotated(x.double(), -positions, base=base),
            "positions start at 0": lambda: rotated(x.double(), positions - case.pos, base=base),
        },
    )


def _rope_by_pytorch(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """The usual formula in x's dtype, with exact angles: its loss is that of the products."""
    half = x.shape[-1] // 2
    frequency = base ** -(torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angle = (positions.double()[:, None] * frequency).repeat(1, 2)[:, None]  # (seq, 1, head_dim)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


DISTANCES = [Case("a shift of 1000", why="what RoPE is for", head_dim=64, shift=1000)]


@suite.check("prefill", DISTANCES, kernels=False)
def scores_depend_on_distance_alone(case, device, rng):
    q, k = (rng.randn(1, 12, 2, case.head_dim, dtype=torch.float64) for _ in range(2))
    rope = RoPE(case.head_dim, device=device, dtype=torch.float64)

    def scores(pos):  # (batch, heads, 12, 12)
        rotated_q, rotated_k = (apply_rotary_emb(t, *rope(12, pos)).transpose(1, 2) for t in (q, k))
        return rotated_q @ rotated_k.mT

    axes = ("batch", "head", "query", "key")
    assert_close(scores(case.shift).float(), scores(0), scores(0).float(), axes=axes)
    unrotated = q.transpose(1, 2) @ k.transpose(1, 2).mT
    assert not torch.allclose(scores(0), unrotated), "nothing was rotated"


# ---- logits

TINY = dict(batch=2, heads=2, head_dim=8, layers=1, vocab=11)
SMALL = dict(batch=2, heads=4, head_dim=16, layers=2, vocab=50)
LARGE = dict(batch=4, heads=16, head_dim=128, layers=4, vocab=500)
SPLIT = SMALL | dict(batch=1, heads=2, head_dim=64)
WORDY = SMALL | dict(heads=2, head_dim=32, vocab=200)

PREFILL = [
    Case("tiny", why="small enough for the check build", small=True, **TINY, chunks=(5,)),
    Case("one token", why="a prompt of one: the decode kernel at position 0", small=True, **TINY, chunks=(1,)),
    Case("ragged", why="no size is a power of two", **SMALL | {"batch": 3, "vocab": 47}, chunks=(37,)),
    Case("one past a tile", why="65 rows: one past a tile of 64", **SMALL, chunks=(65,)),
    Case("course's head_dim", why="head_dim 128", **SMALL | {"heads": 1, "head_dim": 128}, chunks=(40,)),
    Case("head_dim 80", why="not a power of two", **SMALL | {"head_dim": 80, "batch": 1}, chunks=(20,)),
    Case("head_dim 6", why="rows that no 16-byte load fits", **SMALL | {"head_dim": 6}, chunks=(20,)),
    Case("one layer, one head", why="nothing to mix up", **SMALL | {"heads": 1, "layers": 1}, chunks=(20,)),
    Case("own cache", why="kv_cache None makes one", **SMALL, chunks=(9,), own_cache=True),
    Case("int32 ids", why="the other dtype of token ids", **SMALL, chunks=(9,), ids=torch.int32),
    Case("bfloat16", why="the dtype of large models", **SMALL, chunks=(33,), dtype=torch.bfloat16),
    Case("float16", why="the dtype of older GPUs", **SMALL, chunks=(33,), dtype=torch.float16),
    Case("two chunks", why="the second sees the first", small=True, **TINY, chunks=(4, 3)),
    Case("uneven chunks", why="boundaries off the tiles", **SMALL, chunks=(33, 2, 64, 30)),
    Case("long", why="several tiles of keys, larger sizes", devices=("cuda",), **LARGE, chunks=(700, 324)),
]  # fmt: skip

DECODE = [
    Case("tiny", why="small enough for the check build", small=True, **TINY, chunks=(3, 1, 1)),
    Case("from nothing", why="every token goes through the decode kernel", **SMALL, chunks=(1,) * 12),
    Case("after a prompt", why="positions continue", **SMALL, chunks=(30, *(1,) * 10)),
    Case("to the end of the cache", why="the last position there is", **SMALL, chunks=(60, *(1,) * 6), room=0),
    Case("a roomy cache", why="positions that are not written yet are not read", **SMALL, chunks=(20, *(1,) * 4), room=100),
    Case("one sequence", why="batch 1 must not lose its dimension", **SMALL | {"batch": 1}, chunks=(17, *(1,) * 5)),
    Case("a chunk in between", why="prefill on a cache that decode has extended", **SMALL, chunks=(10, 1, 1, 12, 1)),
    Case("head_dim 128", why="the course's head_dim", **SMALL | {"head_dim": 128, "heads": 1}, chunks=(20, 1, 1)),
    Case("head_dim 6", why="rows that no 16-byte load fits", **SMALL | {"head_dim": 6}, chunks=(20, 1, 1)),
    Case("bfloat16", why="the dtype of large models", **SMALL, chunks=(20, *(1,) * 5), dtype=torch.bfloat16),
    Case("split keys", why="blocks share the keys of a head", devices=("cuda",), **SPLIT, chunks=(3000, *(1,) * 5)),
]  # fmt: skip


@suite.check("prefill", PREFILL)
def prefill_matches_a_plain_model(case, device, rng):
    compare_logits(case, device, rng)


@suite.check("decode", DECODE)
def decode_matches_a_plain_model(case, device, rng):
    compare_logits(case, device, rng)


def compare_logits(case, device, rng):
    """The tokens in the case's chunks; every logit against the plain model's, which sees all tokens at once."""
    dtype = case.values.get("dtype", torch.float32)
    model = make_model(case, device, rng, dtype)
    seq = sum(case.chunks)
    tokens = rng.integers(0, case.vocab, case.batch, seq, dtype=case.values.get("ids", torch.int64))
    own = case.values.get("own_cache")
    kv_cache = None if own else model.new_kv_cache(case.batch, seq + case.values.get("room", 3))
    for cache in (cache for layer in kv_cache or () for cache in layer):
        hide_(cache)  # what is not written yet must not be read
    # First: the attention has the weights, and must not change what it is compared with.
    truth, pytorch = (plain_logits(model, tokens, t) for t in (torch.float64, dtype))
    parts, pos, prefill, decode = [], 0, Watch(), Watch()
    with count_launches() as launches:
        for n in case.chunks:
            with decode if n == 1 else prefill:
                logits, kv_cache = model(tokens[:, pos : pos + n], kv_cache, pos)
            parts.append(logits)
            pos += n
    assert_close(
        torch.cat(parts, dim=1),
        truth,
        pytorch,
        axes=AXES,
        suspects=suspects(model, tokens, case.chunks),
    )
    expect_launches(launches, case.layers, case.chunks)
    decode.expect_small(_largest_in_a_step(case, seq, device, dtype))
    for did in (prefill, decode):
        did.expect_projections_only("task6/attention.py")


def _largest_in_a_step(case, seq, device, dtype):
    """Bytes: the MLP's inner tensor, the logits, or partial results of the splits; not the cache."""
    splits = max(
        choose_num_splits(case.batch * case.heads, n, sm_count(device)) for n in range(1, seq + 1)
    )
    partial = 4 * case.heads * splits * (case.head_dim + 1)
    wide = dtype.itemsize * max(MLP_FACTOR * case.heads * case.head_dim, case.vocab)
    return case.batch * max(partial, wide)


def make_model(case, device, rng, dtype=torch.float32) -> customModel:
    """The case's model, with weights that make every part of it count."""
    torch.manual_seed(rng.seed)
    args = (case.heads * case.head_dim, case.heads, case.layers, case.vocab)
    model = customModel(*args, max_seq_len=3100, device=device, dtype=dtype)
    for name, weight in model.named_parameters():
        if "norm" in name:  # all are 1: a missing norm weight would not show
            weight.add_(rng.randn(*weight.shape, dtype=dtype, scale=0.2))
        elif "qkv" in name:  # sharp attention; even attention repeats the same few tokens
            weight.mul_(2)
    return model


def suspects(
    model: customModel, tokens: Tensor, chunks: tuple[int, ...]
) -> dict[str, Callable[[], Tensor]]:
    """What comes out when one step is wrong; computed only after a failure."""
    device, seq = tokens.device, sum(chunks)
    piece = torch.tensor([i for i, n in enumerate(chunks) for _ in range(n)], device=device)
    restarted = torch.cat([torch.arange(n, device=device) for n in chunks])
    past = torch.ones(seq, seq, dtype=torch.bool, device=device).tril()
    own = piece[:, None] == piece

    def mistake(**how: object) -> Callable[[], Tensor]:
        return lambda: plain_logits(model, tokens, torch.float64, **how)

    found = {
        "RoPE is not applied": mistake(pairs="none"),
        "RoPE is applied to q only": mistake(rotate="q"),
        "RoPE is applied to k only": mistake(rotate="k"),
        "RoPE is applied to v, too": mistake(rotate="qkv"),
        "RoPE is applied twice": mistake(rotate="qkqk"),
        "RoPE pairs neighbours instead of halves": mistake(pairs="neighbours"),
        "the causal mask is missing within a chunk": mistake(seen=past | own),
    }
    if len(chunks) > 1:
        found |= {
            "RoPE starts at position 0 in every call": mistake(positions=restarted),
            "a call sees its own tokens only, not the cache": mistake(seen=past & own),
        }
    return found


# ---- which kernels ran


@contextmanager
def count_launches() -> Iterator[Counter[str]]:
    """Counts the launches inside the context: ``{"task4 flash_attention": 2, ...}``."""
    counts: Counter[str] = Counter()

    def counted(
        kernels: Kernels, name: str, arguments: Arguments, launch: Callable[[Arguments], None]
    ) -> None:
        # BEGIN STAFF
        if kernels.source.parent.name == "ladder":  # counted by _count_rungs
            return launch(arguments)
        # END STAFF
        counts[f"{kernels.source.parent.name} {name}"] += 1
        return launch(arguments)

    with ExitStack() as contexts:
        contexts.enter_context(observing(counted))
        # BEGIN STAFF
        contexts.enter_context(_count_rungs(counts))
        # END STAFF
        yield counts


# BEGIN STAFF
@contextmanager
def _count_rungs(counts: Counter[str]) -> Iterator[None]:
    """Counts the prompts that a rung of the ladder, or task 5's for chunks, runs as task 4's kernel.

    On a GPU Kernels.launch does not see the rungs.
    """
    from unittest import mock

    from task4 import ladder, prefill

    def counting(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def counted(*qkv: Tensor, **options: object) -> Tensor:
            counts["task4 flash_attention"] += 1
            return run(*qkv, **options)

        return counted

    with ExitStack() as patches:
        for module, name in ((ladder, "ladder_attention"), (prefill, "chunk_attention")):
            counted = counting(getattr(module, name))
            patches.enter_context(mock.patch.object(module, name, counted))
        known = mock.patch.object(ladder.known_calls, "launch", lambda *call: None)
        patches.enter_context(known)
        yield


# END STAFF
def expect_launches(launches: Counter[str], layers: int, chunks: tuple[int, ...]) -> None:
    """CheckFailed unless each layer updated its cache and ran one attention for every chunk, and the right one."""
    decodes = sum(n == 1 for n in chunks)
    wanted = {
        "task5 update_kv_cache": layers * len(chunks),
        "task5 flash_attention_decode": layers * decodes,
        "task4 flash_attention": layers * (len(chunks) - decodes),
    }
    ran = {name: launches[name] for name in wanted}
    if chunks[0] == 1 and ran["task4 flash_attention"] == layers * (len(chunks) - decodes + 1):
        ran |= {name: wanted[name] for name in list(wanted)[1:]}  # a prompt of one may be prefilled
    for name, n in wanted.items():
        if ran[name] != n:
            raise CheckFailed(
                f"the result is right, but {name} ran {ran[name]} times; it should have run {n} times"
                f" ({layers} layers; {len(chunks) - decodes} prompts or chunks, {decodes} single tokens)"
            )


# ---- generating

GENERATE = [
    Case("tiny", why="small enough for the check build", small=True, **TINY, prompt=2, new=3),
    Case("one sequence", why="100 tokens in a row", **WORDY | {"batch": 1, "heads": 4}, prompt=20, new=100),
    Case("a batch", why="sequences must not see each other", **WORDY | {"batch": 3}, prompt=33, new=100),
    Case("head_dim 64", why="another shape and seed", **WORDY | {"head_dim": 64}, prompt=65, new=100),
    Case("prompt of one", why="decoding from the first token on", **WORDY, prompt=1, new=20),
    Case("larger", why="many layers add up their errors", devices=("cuda",), **LARGE | {"layers": 8}, prompt=512, new=100),
]  # fmt: skip


@suite.check("generate", GENERATE)
def greedy_tokens_equal_a_plain_model(case, device, rng):
    model = make_model(case, device, rng)
    prompt = rng.integers(0, case.vocab, case.batch, case.prompt)
    kept, weights = prompt.clone(), [weight.clone() for weight in model.parameters()]
    with count_launches() as launches, Watch() as did:
        tokens = generate(model, prompt, case.new)
    assert torch.equal(prompt, kept), "generate() changed the prompt"
    # Otherwise the plain model below would have the same wrong ones.
    assert all(map(torch.equal, model.parameters(), weights)), "generate() changed the weights"
    assert tokens.shape == (case.batch, case.new), (
        f"generate() should return {(case.batch, case.new)} tokens; got {tuple(tokens.shape)}"
    )
    check_greedy(model, prompt, tokens)
    expect_launches(launches, case.layers, (case.prompt, *(1,) * (case.new - 1)))
    did.expect_projections_only("task6/attention.py")
    if case.new >= 100:  # else a model that always writes the same token could pass
        different = min(len(set(row)) for row in tokens.tolist())
        assert different >= 15, (
            f"100 tokens, but only {different} different ones: this model proves nothing"
        )


def check_greedy(model: customModel, prompt: Tensor, tokens: Tensor) -> None:
    """CheckFailed unless ``tokens (batch, n)`` are those that the plain model generates in float64.

    The plain model gets the prompt and our tokens, and predicts the next token at every position. If all agree, ours
    are what it would have generated. Where one does not, its logit must be so close to the best that float32 cannot
    tell them apart: then both continuations are right, and the rest is compared on ours.
    """
    given = torch.cat((prompt, tokens[:, :-1]), dim=1)
    n = tokens.shape[1]
    truth = plain_logits(model, given, torch.float64)[:, -n:]  # (batch, n, vocab)
    pytorch = plain_logits(model, given, torch.float32)[:, -n:]
    loss = (pytorch.double() - truth).abs().max().item()
    budget = (
        FACTOR * loss + torch.finfo(torch.float32).eps * truth.abs().max().item()
    )  # as in assert_close
    best, best_token = truth.max(-1)  # (batch, n)
    margin = best - truth.gather(-1, tokens[..., None])[..., 0]
    # one logit may be too high by the budget, the other too low
    wrong = (margin > 2 * budget).nonzero().tolist()
    if wrong:
        b, t = min(wrong, key=lambda place: place[1])
        raise CheckFailed(
            f"new token {t} of sequence {b} should be {best_token[b, t].item()}; got {tokens[b, t].item()}, whose"
            f" logit is {margin[b, t].item():.3g} lower. float32 accounts for {2 * budget:.3g}.\n"
            f"{len(wrong)} of {tokens.numel()} tokens are off; all before position {t} are right"
        )


# ---- the module around it

ONE = [Case("a small model", why="what every user of a module relies on", **SMALL)]


@suite.check("prefill", ONE, kernels=False)
def weights_follow_the_seed_and_the_device(case, device, rng):
    hidden = case.heads * case.head_dim
    args = (hidden, case.heads, case.layers, case.vocab)
    torch.manual_seed(rng.seed)
    model = customModel(*args, device=device)
    torch.manual_seed(rng.seed)
    with torch.device(device):
        again = customModel(*args)
    other = customModel(*args, device=device)
    for name, weight in model.state_dict().items():
        assert weight.device == device, f"{name} is on {weight.device}, not on {device}"
        assert torch.equal(weight, again.state_dict()[name]), (
            f"{name} differs although the seed is the same"
        )
        same = torch.equal(weight, other.state_dict()[name])
        assert same == ("norm" in name), (
            f"{name} {'repeats' if same else 'is random'} without a seed"
        )
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.lm_head.weight, model.lm_head.weight)
    assert {p.dtype for p in model.to(torch.bfloat16).parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in model.parameters()), (
        "weights require gradients, which no kernel computes"
    )


@suite.check(
    "prefill", [Case("the course's model", why="26 GB, none of it allocated here")], kernels=False
)
def memory_is_known_beforehand(case, device, rng):
    model = customModel(4096, 32, 24, 8192, device="meta")  # a weight made elsewhere would show
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"meta"}
    needed = memory_needed(4096, 24, 8192, 1124, batch=4, seq=1024)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    cache = sum(t.numel() * t.element_size() for pair in model.new_kv_cache(4, 1124) for t in pair)
    for name, count in (("weights", weights), ("kv_cache", cache)):
        assert needed[name] == count, (
            f"{name} take {gib(count)}; memory_needed says {gib(needed[name])}"
        )


REFUSED = [
    Case("empty prompt", why="nothing to continue", x=(2, 0), says="at least one token"),
    Case("no batch", why="rank 1", x=(5,), says="x must be (batch, seq)"),
    Case("floats", why="not token ids", x=(2, 5), dtype=torch.float32, says="int64 or int32"),
    Case("id too large", why="a vocabulary of 50", x=(2, 5), token=50, says="from 0 to 49; got"),
    Case("id negative", why="ids start at 0", x=(2, 5), token=-1, says="from 0 to 49; got -1"),
    Case("negative position", why="before the cache", x=(2, 5), pos=-1, says="from current_pos -1 do not fit"),
    Case("past the cache", why="the last row is outside", x=(2, 5), pos=8, says="do not fit a cache of 12"),
    Case("prompt too long", why="longer than the cache", x=(2, 13), says="do not fit a cache of 12"),
    Case("past the model", why="a cache longer than max_seq_len", x=(2, 5), pos=16, length=30, says="20 positions"),
    Case("another batch", why="a cache for other sequences", x=(3, 5), says="must be (3, 12, 64)"),
    Case("a layer short", why="caches of another model", x=(2, 5), drop=True, says="each of 2 layers"),
    Case("cache of another dtype", why="half the bytes per row", x=(2, 5), cache=torch.float16, says="float32 on"),
    Case("no cache", why="positions 0 to 2 are unknown", x=(2, 5), pos=3, length=None, says="needs the kv_cache"),
]  # fmt: skip


@suite.check("decode", REFUSED, kernels=False)
def wrong_input_is_refused(case, device, rng):
    v = case.values
    model = customModel(64, 4, 2, 50, max_seq_len=20, device=device)
    x = rng.integers(0, 50, *case.x).to(v.get("dtype", torch.int64))
    if "token" in v:
        x[-1, -1] = v["token"]
    cache = None
    if (length := v.get("length", 12)) is not None:
        shape = (2, length, 64)
        cache = [
            tuple(rng.randn(*shape, dtype=v.get("cache", torch.float32)) for _ in "kv")
            for _ in range(2)
        ]
    kept = [t.clone() for pair in cache or () for t in pair]
    given = cache[:1] if v.get("drop") else cache
    with count_launches() as launches:
        try:
            model(x, given, v.get("pos", 0))
        except ValueError as error:
            assert case.says in str(error), f"the error should say '{case.says}'; it says: {error}"
        else:
            raise AssertionError("it was accepted")
    assert not launches, f"kernels ran before the error: {dict(launches)}"
    assert all(map(torch.equal, kept, (t for pair in cache or () for t in pair))), (
        "the cache was changed"
    )


# ---- how fast


@suite.benchmark("time to first token, time between tokens", fields=("TTFT", "TBT"))
def speed(device, record):
    """The course's configuration in fp32, beside the same model with PyTorch's SDPA on the same cache."""
    hidden, heads, layers, vocab, batch, prompt_len, new = 4096, 32, 24, 8192, 4, 1024, 100
    length = prompt_len + new

    def needed(layers: int) -> float:
        sizes = (hidden, layers, vocab, length)
        # The check holds a layer's weights, one sequence, its scores and its logits in float64.
        check = 16 * hidden**2 + length * (16 * hidden + 3 * heads * length + 3 * vocab)
        return memory_needed(*sizes, batch=batch, seq=prompt_len)["total"] + 8 * check

    note, free = "", free_memory(device)[0]
    while needed(layers) > 0.95 * free and layers > 1:
        layers //= 2
        note = f"scaled down to {layers} of 24 layers: {gib(needed(24))} are needed, {gib(free)} are free; "
    require_memory(
        needed(layers), device, f"a model of {layers} layers with its cache and its check"
    )
    model = customModel(hidden, heads, layers, vocab, max_seq_len=length, device=device)
    prompt = torch.randint(vocab, (batch, prompt_len), device=device)
    kv_cache = model.new_kv_cache(batch)
    models = {
        "ours": model,
        f"{Backend.EFFICIENT}, cached": lambda *a: sdpa_model(model, *a),
    }
    shape = f"B{batch}, prompt {prompt_len}, hidden {hidden}, {heads} heads, {layers} layers, vocabulary {vocab}"

    def first_token(run: Callable) -> Tensor:
        return run(prompt, kv_cache, 0)[0][:, -1:].argmax(-1)  # (batch, 1)

    for name, run in models.items():  # warm-up; is it right, and by which kernels?
        with count_launches() as launches:
            tokens, _ = generate_timed(run, first_token(run), kv_cache, prompt_len, new)
        check_greedy(model, prompt[:1], tokens[:1])
        expect_launches(launches, layers if name == "ours" else 0, (prompt_len, *[1] * (new - 1)))

    functions = {name: lambda run=run: first_token(run) for name, run in models.items()}
    ttft = measure(functions, seconds=8, include_host=True)
    attention = 4 * batch * hidden * prompt_len**2 / 2 * layers  # causal: half
    flops = 2 * batch * prompt_len * (16 * hidden**2 * layers + hidden * vocab) + attention
    ours = ttft.pop("ours")
    record.add(Benchmark("TTFT", shape, torch.float32, ours, ttft, flops=flops, note=note))

    steps: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(3):
        for name, run in models.items():  # interleaved, so that clocks and heat are the same
            steps[name] += generate_timed(run, first_token(run), kv_cache, prompt_len, new)[1]
    # of the embedding only one row per sequence
    read = 4 * (16 * hidden**2 * layers + vocab * hidden)
    read += 2 * layers * batch * (prompt_len + new / 2) * hidden * 4
    tbt = {name: Timing.of(times) for name, times in steps.items()}
    ours = tbt.pop("ours")
    mean = sum(steps["ours"]) / len(steps["ours"])
    note += f"mean {mean:.2f} ms; calls from Python included; bytes: weights and cache, once"
    record.add(Benchmark("TBT", shape, torch.float32, ours, tbt, bytes=read, note=note))


def generate_timed(
    run: Callable, token: Tensor, kv_cache: KVCache, pos: int, new: int
) -> tuple[Tensor, list[float]]:
    """Greedy tokens ``(batch, new)`` after the first one, and the milliseconds of each step after it."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(new)]
    tokens = [token]
    events[0].record()
    for i in range(1, new):
        tokens.append(run(tokens[-1], kv_cache, pos + i - 1)[0].argmax(-1))  # (batch, 1)
        events[i].record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in zip(events[:-1], events[1:], strict=True)]
    return torch.cat(tokens, dim=1), times


def sdpa_model(
    model: customModel, x: Tensor, kv_cache: KVCache, current_pos: int
) -> tuple[Tensor, KVCache]:
    """The baseline: the same weights, MLP and cache; only the attention is PyTorch's."""
    end = current_pos + x.shape[1]
    h = model.embedding(x)
    for layer, (k_cache, v_cache) in zip(model.layers, kv_cache, strict=True):
        attention = layer.attention
        cos, sin = attention.rope(x.shape[1], current_pos)
        qkv = attention.qkv_proj(layer.attention_norm(h)).unflatten(
            -1, (3, attention.num_heads, -1)
        )
        q, k = apply_rotary_emb(qkv[:, :, :2].flatten(2, 3), cos, sin).chunk(2, dim=2)
        k_cache[:, current_pos:end] = k.flatten(2)
        v_cache[:, current_pos:end] = qkv[:, :, 2].flatten(2)
        k, v = (c[:, :end].unflatten(-1, (attention.num_heads, -1)) for c in (k_cache, v_cache))
        o = sdpa(q, k, v, backend=Backend.EFFICIENT, causal=x.shape[1] > 1)
        h = h + attention.o_proj(o.flatten(2))
        h = h + layer.mlp(layer.mlp_norm(h))
    return model.lm_head(model.norm(h)), kv_cache


test_task6 = suite.pytest()

if __name__ == "__main__":
    # BEGIN STAFF
    # With one of the options that generation's command has, such as --config, it is that command.
    import sys

    from task6.generation.__main__ import OPTIONS, asked_for, main

    if asked_for(sys.argv[1:]):
        sys.exit(main(prog="python -m task6.test"))
    if {"-h", "--help"} & {*sys.argv[1:]}:
        print(f"With {', '.join(OPTIONS)}: see python -m task6.generation --help\n")
    # END STAFF
    suite.main()
