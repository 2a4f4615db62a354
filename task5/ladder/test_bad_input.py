"""What decode says of arguments that do not fit, and of rungs that do not take them."""

import math
from types import SimpleNamespace

import pytest
import torch

from common.tests.devices import DEVICE, of_gpus_hopper
from task5.ladder import call, checks, decode_attention
from task5.ladder.kernels import BY_LENGTH, IN_16_BITS, OF_EIGHT_WARPS

HALF = torch.float16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(1, 17, 2, 64, dtype=HALF)}, "q must have from 1 to 16 tokens; got 17"),
        ({"q": torch.zeros(1, 1, 2, 64, dtype=torch.float64)}, "q must be .* float64"),
        ({"q": torch.zeros(1, 1, 3, 64, dtype=HALF)}, "kv heads must divide the query heads; got 3 and 2"),
        ({n: torch.zeros(1, 1, 2, 96, dtype=HALF) for n in "qkv"}, "head_dim must be 64, 128 or 256; got 96"),
        ({"k": torch.zeros(1, 40, 2, 68, dtype=HALF)[..., 2:-2]}, "k must have a contiguous last dimension, and rows that begin"),
        ({"window": 0}, "window must be at least 1 key, or None; got 0"),
        ({"window": "a"}, "window must be at least 1 key, or None; got 'a'"),
        ({"new_keys": -1}, "new_keys must be at least 0 keys, or None; got -1"),
        ({"new_keys": 1.5}, "new_keys must be at least 0 keys, or None; got 1.5"),
        ({"scale": -1.0}, "scale must be above 0 and finite, from 1.18e-38 to 2.36e\\+38; got -1.0"),
        ({"scale": math.nan}, "scale must be above 0 and finite, .* got nan"),
        ({"scale": 1e300}, "scale must be above 0 and finite, .* got 1e\\+300"),
        ({"scale": 1e-46}, "scale must be above 0 and finite, .* got 1e-46"),  # 0 in float32
        ({"scale": 3e38}, "scale must be above 0 and finite, .* got 3e\\+38"),  # infinite times log2(e)
        ({"scale": "1"}, "scale must be above 0 and finite, .* got '1'"),
        ({"scale": torch.tensor([1.0, 2.0])}, "scale must be above 0 and finite, .* got tensor"),
        ({n: torch.zeros(1, 1, 1, 64, dtype=HALF) for n in "kv"}
         | {"q": torch.zeros(1, 16, 1, 64, dtype=HALF).expand(1, 16, 20_000, 64)}, "must be below 4,294,967,296; got 16 tokens and 20,000 heads"),
        ({n: torch.zeros(1, 1, 1, 64, dtype=HALF).expand(70, 1 << 24, 256, 64) for n in "kv"}
         | {"q": torch.zeros(70, 1, 256, 64, dtype=HALF)}, "there must be at most 2,147,483,647 tiles of 16 keys"),
        ({"rung": 13}, r"rung must be one of \(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12\); got 13"),
        ({"rung": torch.tensor(1)}, r"rung must be one of .* got tensor\(1\)"),
        ({"seqlens_k": torch.zeros(2, dtype=torch.int32)}, "seqlens_k must be"),
        ({"block_table": torch.zeros(1, 2, dtype=torch.int32)}, "page_size must be a multiple of 16 up to 256; got 40"),
        ({"block_table": torch.zeros(1, 2), **{n: torch.zeros(3, 32, 2, 64, dtype=HALF) for n in "kv"}}, "block_table must be .* int32"),
    ],
)  # fmt: skip
def test_bad_input(change, message):
    given = (
        {"q": torch.zeros(1, 1, 2, 64, dtype=HALF)}
        | {n: torch.zeros(1, 40, 2, 64, dtype=HALF) for n in "kv"}
        | change
    )
    with pytest.raises(ValueError, match=message):
        decode_attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)


def test_a_pool_is_too_large(monkeypatch):
    monkeypatch.setattr(checks, "MAX_POOL", 3 * 16 * 2 * 64 * 2 - 1)
    q, k = torch.zeros(1, 1, 2, 64, dtype=HALF), torch.zeros(4, 16, 2, 64, dtype=HALF)
    table = torch.zeros(1, 2, dtype=torch.int32)
    assert not decode_attention(q, k[:3], k[:3], block_table=table).any()
    apart = torch.zeros(6, 16, 2, 64, dtype=HALF)[::2]
    with pytest.raises(
        ValueError, match="pages of v must begin within .* bytes of the first; got 20,224"
    ):
        decode_attention(q, k[:3], apart, block_table=table)
    with pytest.raises(
        ValueError, match="pages of k must begin within 12,287 bytes of the first; got 16,128"
    ):
        decode_attention(q, k, k, block_table=table)


def test_of_gpus_rung_2_is_for_hopper(monkeypatch):
    monkeypatch.setattr(call, "is_hopper", lambda device: False)
    q = SimpleNamespace(is_cuda=True, device="cuda:0")
    with pytest.raises(ValueError, match="of GPUs, rung 2 runs on Hopper alone; .* on cuda:0"):
        call._check_rung(q, 2)


@of_gpus_hopper
@pytest.mark.parametrize("rung", IN_16_BITS)
def test_rungs_for_16_bits(rung):
    q = torch.zeros(1, 1, 2, 64, device=DEVICE)
    with pytest.raises(ValueError, match=f"rung {rung} computes in 16 bits; got .*float32"):
        decode_attention(q, q, q, rung=rung)


@of_gpus_hopper
@pytest.mark.parametrize("rung", OF_EIGHT_WARPS)
def test_eight_warps_are_for_head_dims_up_to_128(rung):
    q = torch.zeros(1, 1, 2, 256, device=DEVICE, dtype=torch.float16)
    with pytest.raises(ValueError, match=f"rung {rung} is for head_dim up to 128; got 256"):
        decode_attention(q, q, q, rung=rung)


@of_gpus_hopper
@pytest.mark.parametrize("rung", BY_LENGTH)
def test_by_length_are_up_to_128_sequences(rung):
    q = torch.zeros(129, 1, 1, 64, device=DEVICE, dtype=torch.float16)
    with pytest.raises(ValueError, match=f"rung {rung} is for up to 128 sequences; got 129"):
        decode_attention(q, q, q, rung=rung)
