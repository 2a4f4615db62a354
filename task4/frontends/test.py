"""Task 4's own cases, for each front end."""

import contextlib
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

import task4.attention
import task5.attention
from common.check import Case, Suite, assert_close
from common.check.attention import hide_invisible, mistakes, references
from common.check.case import CheckFunction
from common.check.watch import Watch
from task4.frontends import cpp, operators
from task4.frontends.frontends import FRONT_ENDS, FrontEnd
from task4.test import ATTENTION
from task6.attention import RoPE, customAttention

suite = Suite("task4.frontends", title="FlashAttention-2 through other front ends")
AXES = ("batch", "row", "head", "column")

# Those that are about the output's memory or the tile of our kernel are not of interest here.
CASES = [case for case in ATTENTION if not (case.gaps or case.large_tile)]
HOST = [replace(case, devices=("cpu",)) for case in CASES if "cpu" in case.devices]
# The configurations of the assignment that asks for a kernel in C++: 8 heads of 64, at most 1e-3 off.
ASSIGNMENT = [
    Case(f"S {seq}", why="the assignment's largest error is 1e-3", devices=("cpu",), seq=seq)
    for seq in (128, 512, 1024)
]


@suite.check("cpp", HOST, kernels=False)
def host_matches_float64(case, device, rng):
    q, k, v = case.qkv(rng)
    visible = case.visible(device)
    truth, pytorch = references(q, k, v, large_scores=case.large_scores, **visible)
    inputs = q, k.clone(), v.clone()
    hide_invisible(k, v, **visible)
    with Watch() as did:
        got = cpp.flash_attention(q, k, v, **visible)
    assert_close(got, truth, pytorch, axes=AXES, suspects=mistakes(*inputs, **visible))
    did.expect({}, memory=got.nbytes)


def cases_of(front_end: FrontEnd) -> list[Case]:
    """Those that it can do; in Numba's simulator, which is slow, those that take a second."""
    found = []
    for case in CASES:
        work = case.batch * case.heads * case.q_len * max(case.kv_len, 1) * case.head_dim
        short = work <= 330_000 and case.kv_len < 100
        devices = set(front_end.devices)
        if front_end.simulator and (short or front_end.name != "numba"):
            devices.add("cpu")
        if front_end.name == "thunder" and not thunder_has(case):
            continue
        if devices := devices.intersection(case.devices):
            found.append(replace(case, devices=tuple(sorted(devices))))
    return found


def thunder_has(case: Case) -> bool:
    """Whether PyTorch's SDPA as Thunder knows it can express the case."""
    lengths = case.seqlens or case.leftpad or case.kv_len == 0
    grouped, cut = case.heads != case.kv_heads, case.causal and case.q_len != case.kv_len
    return not (lengths or grouped or cut)


def matches_float64(front_end: FrontEnd) -> CheckFunction:
    """The check of one of them."""

    def check(case, device, rng):
        if reason := front_end.why_not(device.type):
            pytest.skip(reason)
        q, k, v = case.qkv(rng)
        visible = case.visible(device)
        truth, pytorch = references(q, k, v, large_scores=case.large_scores, **visible)
        inputs = q, k.clone(), v.clone()
        hide_invisible(k, v, **visible)
        got = front_end.attention(q, k, v, **visible)
        assert_close(got, truth, pytorch, axes=AXES, suspects=mistakes(*inputs, **visible))

    check.__name__ = f"{front_end.name}_matches_float64"
    return check


for front_end in FRONT_ENDS:
    if front_end.name != "cpp":
        ours = front_end.name == "operators"
        suite.check(front_end.name, cases_of(front_end), kernels=ours)(matches_float64(front_end))


@suite.check("cpp", ASSIGNMENT, kernels=False)
def cpp_solves_the_assignment(case, device, rng):
    q, k, v = (rng.randn(1, case.seq, 8, 64) for _ in range(3))
    for causal in (False, True):
        truth, pytorch = references(q, k, v, causal=causal)
        for attend in (cpp.flash_attention, cpp.naive_attention):
            got = attend(q, k, v, causal=causal)
            error = (got - truth).abs().max().item()
            assert error < 1e-3, f"{attend.__name__} is {error:.3g} off; the assignment allows 1e-3"
            assert_close(got, truth, pytorch, axes=AXES)


test_frontends = suite.pytest()


def test_more_keys_than_a_head_dim_of_128():
    q, k, v = (torch.randn(2, n, 4, 200) for n in (30, 50, 50))
    truth, pytorch = references(q, k, v, causal=True)
    assert_close(cpp.flash_attention(q, k, v, causal=True), truth, pytorch, axes=AXES)


@pytest.mark.parametrize("threads", [1, 3])
def test_any_number_of_threads_gives_the_same(threads):
    q, k, v = (torch.randn(2, 200, 2, 64) for _ in range(3))
    before = torch.get_num_threads()
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_num_threads, before)
        expected = cpp.flash_attention(q, k, v)
        torch.set_num_threads(threads)
        assert torch.equal(cpp.flash_attention(q, k, v), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(1, 4, 2, 300), "k": torch.zeros(1, 4, 2, 300), "v": torch.zeros(1, 4, 2, 300)}, "head_dim must be from 1 to 256"),
        ({"q": torch.zeros(1, 4, 2, 8, device="meta")}, "runs on the CPU alone"),
        ({"v": torch.zeros(1, 5, 2, 8)}, "v must be"),
        ({"k": torch.zeros(1, 4, 2, 8, dtype=torch.float64)}, "k must be"),
        ({"seqlens_k": torch.zeros(3, dtype=torch.int32)}, "seqlens_k must be"),
    ],
)  # fmt: skip
def test_bad_input(change, message):
    given = {name: torch.zeros(1, 4, 2, 8) for name in "qkv"} | change
    with pytest.raises(ValueError, match=message):
        cpp.flash_attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)


def test_naive_takes_float32_only():
    with pytest.raises(ValueError, match="q must be .* float32"):
        cpp.naive_attention(*(torch.zeros(1, 4, 2, 8, dtype=torch.half) for _ in range(3)))


# Operators -----------------------------------------------------------------------------------------------


def sample(*, heads=4, kv_heads=2, q_len=20):
    return torch.randn(2, q_len, heads, 32), *torch.randn(2, 2, 20, kv_heads, 32)


@pytest.mark.parametrize("lengths", [None, torch.tensor([3, 20], dtype=torch.int32)])
def test_attention_and_decode_are_operators(lengths):
    check, ops = torch.library.opcheck, torch.ops.course
    check(ops.flash_attention, (*sample(), lengths is None, None, lengths, None))
    check(ops.flash_attention_decode, (*sample(q_len=1), 0.3, lengths, None, 2))


def test_the_update_of_a_cache_is_an_operator():
    caches, new = torch.zeros(2, 2, 50, 64), torch.randn(2, 2, 3, 64)
    positions = torch.tensor([3, 5], dtype=torch.int32)
    torch.library.opcheck(torch.ops.course.update_kv_cache, (*caches, *new, 7))
    torch.library.opcheck(torch.ops.course.update_kv_cache_at, (*caches, *new, positions))


def layer_of(task):
    return task.CustomFlashAttention(*torch.randn(4, 64, 64).mul(1 / 8), 64, 4)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@torch.no_grad()
def test_task_4_compiles_whole(backend):
    layer, x = layer_of(task4.attention), torch.randn(2, 33, 64)
    expected = layer(x, causal=True)
    with operators.in_use():
        compiled = torch.compile(layer, fullgraph=True, backend=backend)
        torch.testing.assert_close(compiled(x, causal=True), expected)


@torch.no_grad()
def test_task_5_compiles_whole_for_prompts_and_tokens():
    layer, x = layer_of(task5.attention), torch.randn(2, 20, 64)

    def generated(layer):
        caches = torch.zeros(2, 2, 50, 64)
        found = [layer(x, tuple(caches), causal=True)]
        found += (layer(x[:, :1], tuple(caches), decode=True, current_pos=p) for p in (20, 21))
        return [*found, caches]

    expected = generated(layer)
    with operators.in_use():
        compiled = generated(torch.compile(layer, fullgraph=True, backend="aot_eager"))
    torch.testing.assert_close(compiled, expected)


@torch.no_grad()
def test_task_6_compiles_whole():
    layer, x = customAttention(64, 4, RoPE(16, 50)), torch.randn(2, 20, 64)

    def both(layer):
        caches = torch.zeros(2, 2, 50, 64)
        found = [layer(x, tuple(caches), 0), layer(x[:, :1], tuple(caches), 20)]
        return [*found, caches]

    expected = both(layer)
    with operators.in_use():
        compiled = both(torch.compile(layer, fullgraph=True, backend="aot_eager"))
    torch.testing.assert_close(compiled, expected)


@torch.no_grad()
def test_what_is_exported_has_the_operator():
    layer, x = layer_of(task4.attention), torch.randn(2, 33, 64)
    with operators.in_use():
        exported = torch.export.export(layer, (x,))
    targets = [node.target for node in exported.graph.nodes]
    assert targets.count(torch.ops.course.flash_attention.default) == 1
    torch.testing.assert_close(exported.module()(x), layer(x))


@pytest.mark.parametrize(("q_len", "causal"), [(20, False), (20, True), (7, True), (30, False)])
def test_it_stands_in_for_sdpa(q_len, causal):
    q, k, v = (t.transpose(1, 2) for t in sample(q_len=q_len))
    options = {"is_causal": causal, "scale": 0.3, "enable_gqa": True}
    expected = functional.scaled_dot_product_attention(q, k, v, **options)
    with operators.instead_of_sdpa():
        got = functional.scaled_dot_product_attention(q, k, v, **options)
    torch.testing.assert_close(got, expected)
    assert torch.equal(got, operators.scaled_dot_product_attention(q, k, v, **options))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn_mask": torch.zeros(20, 20)}, "attn_mask is not supported by course::flash_attention: use is_causal"),
        ({"dropout_p": 0.1}, r"got dropout_p 0\.1: call model\.eval\(\) first"),
        ({"enable_gqa": False}, "enable_gqa must be True for 4 heads with 2 of keys"),
        ({"query": torch.zeros(4, 20, 32)}, r"query must be \(batch, heads, q_len, head_dim\)"),
        ({"query": torch.zeros(2, 4, 21, 32), "is_causal": True}, "more queries than keys .* got 21 queries, 20 keys"),
    ],
)  # fmt: skip
def test_what_sdpa_can_do_and_this_cannot(change, message):
    query, key, value = (t.transpose(1, 2) for t in sample())
    given = {"query": query, "key": key, "value": value, "enable_gqa": True} | change
    with pytest.raises(ValueError, match=message):
        operators.scaled_dot_product_attention(**given)


if __name__ == "__main__":
    suite.main()
