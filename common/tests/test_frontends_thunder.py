"""Task 4's kernel as an executor of lightning-thunder."""

import pytest
import torch
from torch import nn
from torch.nn import functional

ours = pytest.importorskip("task4.frontends.thunder", exc_type=ImportError)
thunder = pytest.importorskip("thunder")


class Attention(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x):
        q, k, v = (t.unflatten(2, (4, 16)).transpose(1, 2) for t in self.qkv(x).split(64, 2))
        attended = functional.scaled_dot_product_attention(q, k, v, **self.options)
        return self.out(attended.transpose(1, 2).flatten(2))


def ran_ours(compiled):
    return "course_flash_attention" in str(thunder.last_traces(compiled)[-1])


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}])
@torch.no_grad()
def test_it_replaces_sdpa_in_a_model(options):
    model, x = Attention(**options).requires_grad_(False), torch.randn(2, 33, 64)
    compiled = ours.jit(model)
    torch.testing.assert_close(compiled(x), model(x))
    assert ran_ours(compiled)


def test_a_model_that_is_trained_keeps_torchs():
    model, x = Attention(), torch.randn(2, 9, 64)
    compiled = ours.jit(model)
    compiled(x).square().sum().backward()
    got = [p.grad.clone() for p in model.parameters()]
    assert not ran_ours(compiled)
    model.zero_grad()
    model(x).square().sum().backward()
    torch.testing.assert_close(got, [p.grad for p in model.parameters()])


@pytest.mark.parametrize(
    ("change", "options"),
    [
        ({}, {"attn_mask": torch.ones(20, 20, dtype=torch.bool).tril()}),
        ({"dtype": torch.float64}, {}),
        ({"head_dim": 200}, {}),
        ({"q_len": 30}, {"is_causal": True}),
    ],
)  # fmt: skip
def test_what_the_checker_leaves_to_torch(change, options):
    case = {"q_len": 20, "head_dim": 32, "dtype": torch.float32} | change
    q, k, v = (
        torch.randn(2, 2, n, case["head_dim"], dtype=case["dtype"]) for n in (case["q_len"], 20, 20)
    )

    def attend(q, k, v):
        return functional.scaled_dot_product_attention(q, k, v, **options)

    compiled = ours.jit(attend)
    torch.testing.assert_close(compiled(q, k, v), attend(q, k, v))
    assert not ran_ours(compiled)


def test_rows_that_are_not_contiguous_are_left_to_torch():
    q, k, v = (torch.randn(2, 2, 16, 20).transpose(2, 3) for _ in range(3))
    compiled = ours.jit(functional.scaled_dot_product_attention)
    expected = functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(compiled(q, k, v), expected)
