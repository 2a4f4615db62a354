"""Bad input gets a clear error before anything runs, and nothing is written: one table, on every device.

A row is a call, the type of its error, and words that the message must have: what was expected, and what came. Then no
kernel was launched, and every tensor that the call was given is as it was.
"""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.build import BuildError, Kernels, build, toolchain
from common.check.failure import describe_out_of_memory
from common.memory import NotEnoughMemory, fit_batch, require_memory
from task1.attention import CustomSelfAttention as Task1
from task2 import attention as task2
from task3 import attention as task3
from task4 import attention as task4
from task4.prefill import fast_attention
from task5 import attention as task5
from task6.model import customAttention, customModel, generate
from task6.rope import RoPE, apply_rotary_emb

KERNEL = Path(task2.__file__).with_name("attention_kernel.cu")
DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


class Given:
    """Makes the arguments of a row and remembers what was in them: ``t(2, 8, 64)`` is a random tensor."""

    def __init__(self, device: str, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.device = torch.empty(0, device=device).device  # with its index
        self.elsewhere = torch.device("meta" if device == "cpu" else "cpu")
        self.patch, self.folder = patch, folder
        self._made: list[tuple[Tensor, Tensor]] = []

    def __call__(
        self, *shape: int, dtype: torch.dtype = torch.float32, on: object = None
    ) -> Tensor:
        tensor = torch.randn(shape, device=on or self.device).to(dtype)
        if tensor.device.type != "meta":
            self._made.append((tensor, tensor.clone()))
        return tensor

    def ids(self, *shape: int, highest: int = 49) -> Tensor:
        """Token ids, of which the last is ``highest``."""
        ids = torch.full(shape, 3, device=self.device)
        ids.view(-1)[-1:] = highest
        return ids

    def changed(self) -> bool:
        return any(not torch.equal(tensor, before) for tensor, before in self._made)


class Row:
    def __init__(
        self,
        name: str,
        call: Callable[[Given], object],
        *says: str,
        error: type[Exception] = ValueError,
    ) -> None:
        self.name, self.call, self.says, self.error = name, call, says, error


def layer(layer_class, t, hidden=64, heads=4, w_v=None, **biases):
    w_q, w_k, own_w_v, w_o = (t(hidden, hidden) for _ in range(4))
    return layer_class(w_q, w_k, own_w_v if w_v is None else w_v, w_o, hidden, heads, **biases)


def caches(t, *shape, dtype=torch.float32):
    return t(*shape, dtype=dtype), t(*shape, dtype=dtype)


def model(t):
    return customModel(64, 4, 2, 50, max_seq_len=20, device=t.device)


def model_caches(t, batch=2, length=12, layers=2, dtype=torch.float32):
    return [caches(t, batch, length, 64, dtype=dtype) for _ in range(layers)]


def attention6(t, length=20):
    return customAttention(64, 4, RoPE(16, length, device=t.device), device=t.device)


F64, F16, BF16, I64 = torch.float64, torch.float16, torch.bfloat16, torch.int64
f4, f5 = task4.flash_attention, task5.flash_attention_decode
update = task5.update_kv_cache

LAYERS = {
    "task 1": (Task1, ()),
    "task 2": (task2.CustomSelfAttention, ()),
    "task 3": (task3.CustomFlashAttention, ()),
    "task 4": (task4.CustomFlashAttention, ()),
    "task 5": (task5.CustomFlashAttention, ((2, 9, 64),)),
}


def _layer_rows(task: str, layer_class: type, cache: tuple) -> list[Row]:
    def run(t: Given, x: Tensor) -> object:
        return layer(layer_class, t)(x, *(caches(t, *shape) for shape in cache))

    return [
        Row(f"{task}: hidden_dim not divisible by num_heads", lambda t: layer(layer_class, t, 64, 5),
            "hidden_dim must be a positive multiple of num_heads", "hidden_dim 64, num_heads 5"),
        Row(f"{task}: no heads", lambda t: layer(layer_class, t, 64, 0), "num_heads 0"),
        Row(f"{task}: weight that is no tensor", lambda t: layer_class(None, *(t(64, 64) for _ in "kvo"), 64, 4),
            "w_q must be (64, 64)", "got NoneType"),
        Row(f"{task}: weight of another shape", lambda t: layer(layer_class, t, w_v=t(64, 32)),
            "w_v must be (64, 64) float32", "got (64, 32) float32"),
        Row(f"{task}: weight of another dtype", lambda t: layer(layer_class, t, w_v=t(64, 64, dtype=F16)),
            "w_v must be (64, 64) float32", "got (64, 64) float16"),
        Row(f"{task}: weight on another device", lambda t: layer(layer_class, t, w_v=t(64, 64, on=t.elsewhere)),
            "w_v must be (64, 64) float32 on {device}", "on {elsewhere}"),
        Row(f"{task}: x of rank 2", lambda t: run(t, t(5, 64)), "x must be (batch, seq, 64)", "got (5, 64)"),
        Row(f"{task}: x of another width", lambda t: run(t, t(2, 5, 60)), "(batch, seq, 64)", "got (2, 5, 60)"),
        Row(f"{task}: x of another dtype", lambda t: run(t, t(2, 5, 64, dtype=F64)), "float32", "float64"),
        Row(f"{task}: x on another device", lambda t: run(t, t(2, 5, 64, on=t.elsewhere)),
            "float32 on {device}", "on {elsewhere}"),
    ]  # fmt: skip


def _qkv_rows(task: str, f: Callable, limit: bool = True) -> list[Row]:
    """What every ``f(q, k, v, num_heads)`` on (batch, seq, heads * head_dim) refuses; q has one row for decoding."""
    rows = [
        Row(f"{task}: q of rank 4", lambda t: f(t(2, 1, 4, 16), t(2, 7, 64), t(2, 7, 64), 4),
            "q must be (batch,", "got (2, 1, 4, 16)"),
        Row(f"{task}: k of rank 2", lambda t: f(t(2, 1, 64), t(7, 64), t(2, 7, 64), 4), "k must be (", "got (7, 64)"),
        Row(f"{task}: width not divisible by num_heads", lambda t: f(t(2, 1, 64), t(2, 7, 64), t(2, 7, 64), 5),
            "q must be a positive multiple of num_heads", "64", "num_heads 5"),
        Row(f"{task}: batches differ", lambda t: f(t(2, 1, 64), t(3, 7, 64), t(3, 7, 64), 4),
            "k must be (2, kv_len", "got (3, 7"),
        Row(f"{task}: lengths of k and v differ", lambda t: f(t(2, 1, 64), t(2, 7, 64), t(2, 8, 64), 4),
            "v must be (2, 7,", "got (2, 8,"),
        Row(f"{task}: widths of k and v differ", lambda t: f(t(2, 1, 64), t(2, 7, 64), t(2, 7, 32), 4),
            "v must be (2, 7,", "got (2, 7,"),
        Row(f"{task}: dtypes differ", lambda t: f(t(2, 1, 64), t(2, 7, 64), t(2, 7, 64, dtype=F16), 4),
            "v must be", "float32", "got", "float16"),
        Row(f"{task}: k on another device", lambda t: f(t(2, 1, 64), t(2, 7, 64, on=t.elsewhere), t(2, 7, 64), 4),
            "k must be", "on {device}", "on {elsewhere}"),
        Row(f"{task}: v on another device", lambda t: f(t(2, 1, 64), t(2, 7, 64), t(2, 7, 64, on=t.elsewhere), 4),
            "v must be", "on {device}", "on {elsewhere}"),
    ]  # fmt: skip
    if limit:
        rows += [
            Row(f"{task}: head_dim over the limit", lambda t: f(t(2, 1, 256), t(2, 7, 256), t(2, 7, 256), 1),
                "head_dim must be from 1 to 128", "got 256"),
            Row(f"{task}: a dtype without kernels", lambda t: f(*(t(2, 1, 64, dtype=F64) for _ in "qkv"), 4),
                "q must be", "float32", "got", "float64"),
            Row(f"{task}: a device without kernels", lambda t: f(*(t(2, 1, 64, on="meta") for _ in "qkv"), 4),
                "cpu and cuda tensors", "on meta"),
            Row(f"{task}: last dimension not contiguous", lambda t: f(t(2, 64, 3).mT[:, :1], *caches(t, 2, 7, 64), 4),
                "q must have a contiguous last dimension", "strides"),
        ]  # fmt: skip
    return rows


TASK2 = [
    Row("softmax: rank 4", lambda t: task2.test_batched_softmax(t(2, 3, 4, 5)), "inp must be (batch, rows, n)", "got (2, 3, 4, 5)"),
    Row("softmax: float64", lambda t: task2.test_batched_softmax(t(3, 4, dtype=F64)), "float32", "got (3, 4) float64"),
    Row("softmax: dim 2", lambda t: task2.test_batched_softmax(t(3, 4), 2), "dim must be the last", "got 2"),
    Row("softmax: over the batch", lambda t: task2.test_batched_softmax(t(2, 3, 4), 0), "dim must be the last", "got 0"),
    Row("softmax: too many rows", lambda t: task2.test_batched_softmax(t(1, 1, 2).expand(2**16, 2**15, 2)),
        "at most 2147483647 rows", "got 2147483648"),
    Row("softmax: meta", lambda t: task2.test_batched_softmax(t(3, 4, on="meta")), "cpu and cuda", "on meta"),
    Row("softmax: no tensor", lambda t: task2.test_batched_softmax([1.0, 2.0]), "inp must be (batch, rows, n)", "got list"),
    Row("GEMM_NT: inner sizes differ", lambda t: task2.test_batched_GEMM_NT(t(2, 3, 4), t(2, 5, 6)),
        "b must be (2, N, 4)", "got (2, 5, 6)"),
    Row("GEMM_NN: inner sizes differ", lambda t: task2.test_batched_GEMM_NN(t(2, 3, 4), t(2, 5, 6)),
        "b must be (2, 4, N)", "got (2, 5, 6)"),
    Row("GEMM_NN: batches differ", lambda t: task2.test_batched_GEMM_NN(t(2, 3, 4), t(3, 4, 6)), "(2, 4, N)", "(3, 4, 6)"),
    Row("GEMM_NN: rank 2", lambda t: task2.test_batched_GEMM_NN(t(3, 4), t(4, 6)), "a must be (batch, M, K)", "got (3, 4)"),
    Row("GEMM_NT: float16", lambda t: task2.test_batched_GEMM_NT(t(2, 3, 4, dtype=F16), t(2, 5, 4)), "float32", "float16"),
    Row("GEMM_NT: two devices", lambda t: task2.test_batched_GEMM_NT(t(2, 3, 4), t(2, 5, 4, on=t.elsewhere)),
        "b must be", "on {device}", "on {elsewhere}"),
    Row("attention: fewer heads in k", lambda t: task2.custom_attention(t(2, 5, 64), *caches(t, 2, 7, 32), 4),
        "k must be (2, kv_len,", "got"),
]  # fmt: skip

TASK3 = [
    Row("task 3: tile of no rows", lambda t: task3.flash_attention(t(2, 5, 64), *caches(t, 2, 5, 64), 4, B_r=0),
        "B_r and B_c must be at least 1", "got B_r 0"),
]  # fmt: skip

TASK4 = [
    Row("flash attention: kv heads do not divide", lambda t: f4(t(2, 5, 4, 16), *caches(t, 2, 7, 3, 16)),
        "kv heads must divide the query heads", "got 4 and 3"),
    Row("flash attention: no kv heads", lambda t: f4(t(2, 5, 4, 16), *caches(t, 2, 7, 0, 16)), "kv heads", "4 and 0"),
    Row("flash attention: head_dims differ", lambda t: f4(t(2, 5, 4, 16), *caches(t, 2, 7, 4, 32)),
        "k must be (2, kv_len, kv_heads, 16)", "got (2, 7, 4, 32)"),
    Row("flash attention: head_dim 129", lambda t: f4(*(t(1, 5, 1, 129) for _ in "qkv")), "from 1 to 128", "got 129"),
    Row("flash attention: one length", lambda t: f4(*(t(2, 5, 4, 16) for _ in "qkv"), seqlens_k=t(1, dtype=torch.int32)),
        "seqlens_k must be (2,) int32", "got (1,) int32"),
    Row("flash attention: int64 lengths", lambda t: f4(*(t(2, 5, 4, 16) for _ in "qkv"), seqlens_k=t(2, dtype=I64)),
        "seqlens_k must be (2,) int32", "int64"),
    Row("flash attention: lengths elsewhere",
        lambda t: f4(*(t(2, 5, 4, 16) for _ in "qkv"), leftpad_k=t(2, dtype=torch.int32, on=t.elsewhere)),
        "leftpad_k must be (2,) int32 on {device}", "on {elsewhere}"),
    Row("flash attention: k of no multiple of head_dim",
        lambda t: task4.custom_flash_attention(t(2, 5, 64), *caches(t, 2, 7, 40), 4),
        "multiple of head_dim 16", "got (2, 7, 40)"),
]  # fmt: skip


def _rung(t, rung, *shape, dtype=torch.float16, kv=None, **options):
    q, k, v = (t(*s, dtype=dtype) for s in (shape, kv or shape, kv or shape))
    return fast_attention(q, k, v, rung=rung, **options)


def _odd(t, rung):
    q, k, v = (t(1, 5, 2, 65, dtype=torch.float16)[..., 1:] for _ in "qkv")
    return fast_attention(q, k, v, rung=rung)


LADDER = [
    Row("ladder: no such rung", lambda t: _rung(t, 17, 1, 5, 2, 64), "no rung 17", "rungs 1 to 16"),
    Row("ladder: another dtype", lambda t: _rung(t, 9, 1, 5, 2, 64, dtype=torch.float32),
        "rung 9 (Q and P in registers) takes float16 and bfloat16 tensors", "got float32", "1 to 6"),
    Row("ladder: a dtype that no rung takes", lambda t: _rung(t, 3, 1, 5, 2, 64, dtype=F64), "float16 or bfloat16", "float64"),
    Row("ladder: another head_dim", lambda t: _rung(t, 9, 1, 5, 2, 80), "head_dim 80", "head_dim 64"),
    Row("ladder: head_dim past all", lambda t: _rung(t, 9, 1, 5, 2, 264), "head_dim must be from 1 to", "got 264"),
    Row("ladder: kv heads do not divide", lambda t: _rung(t, 9, 1, 5, 4, 64, kv=(1, 5, 3, 64)), "must divide", "4 and 3"),
    Row("ladder: lengths", lambda t: _rung(t, 9, 1, 5, 2, 64, seqlens_k=t(1, dtype=torch.int32)), "rung 9 takes no seqlens_k"),
    Row("ladder: negative scale", lambda t: _rung(t, 9, 1, 5, 2, 64, scale=-1.0), "scale must be above 0", "got -1.0"),
    Row("ladder: rows that begin anywhere", lambda t: _odd(t, 9),
        "rung 9 (Q and P in registers)", "loads 16 bytes at once", "which q does not allow", "2 bytes", "1 to 6 can take them"),
]  # fmt: skip
TASK5 = [
    Row("decode: two queries", lambda t: f5(t(2, 2, 4, 16), *caches(t, 2, 7, 4, 16)), "one query", "got q_len 2"),
    Row("decode: kv heads do not divide", lambda t: f5(t(2, 1, 4, 16), *caches(t, 2, 7, 3, 16)), "must divide", "4 and 3"),
    Row("decode: no splits", lambda t: f5(t(2, 1, 4, 16), *caches(t, 2, 7, 4, 16), num_splits=0), "from 1 to", "got 0"),
    Row("decode: more splits than keys", lambda t: f5(t(2, 1, 4, 16), *caches(t, 2, 7, 4, 16), num_splits=8),
        "from 1 to kv_len 7", "got 8"),
    Row("cache: current_pos negative", lambda t: update(*caches(t, 2, 8, 64), *caches(t, 2, 3, 64), -1),
        "from 0 to 5", "current_pos -1"),
    Row("cache: current_pos past the end", lambda t: update(*caches(t, 2, 8, 64), *caches(t, 2, 3, 64), 6),
        "cache of 8", "from 0 to 5", "current_pos 6"),
    Row("cache: more rows than it has", lambda t: update(*caches(t, 2, 8, 64), *caches(t, 2, 9, 64), 0),
        "9 new positions", "cache of 8"),
    Row("cache: expanded", lambda t: update(t(1, 8, 64).expand(2, 8, 64), t(2, 8, 64), *caches(t, 2, 1, 64), 0),
        "k_cache is written in place, so it must not be expanded", "strides (0, 64, 1)"),
    Row("cache: int64 positions", lambda t: update(*caches(t, 2, 8, 64), *caches(t, 2, 1, 64), t(2, dtype=I64)),
        "current_pos must be (2,) int32", "int64"),
    Row("cache: another batch", lambda t: update(*caches(t, 2, 8, 64), *caches(t, 3, 1, 64), 0),
        "k must be (2, n, 64)", "got (3, 1, 64)"),
    Row("cache: another width", lambda t: update(*caches(t, 2, 8, 64), *caches(t, 2, 1, 32), 0), "(2, n, 64)", "(2, 1, 32)"),
    Row("cache: another dtype", lambda t: update(*caches(t, 2, 8, 64), *caches(t, 2, 1, 64, dtype=BF16), 0),
        "k must be (2, n, 64) float32", "bfloat16"),
    Row("cache: caches differ", lambda t: update(t(2, 8, 64), t(2, 9, 64), *caches(t, 2, 1, 64), 0),
        "v_cache must be (2, 8, 64)", "got (2, 9, 64)"),
    Row("cache: v elsewhere", lambda t: update(*caches(t, 2, 8, 64), t(2, 1, 64), t(2, 1, 64, on=t.elsewhere), 0),
        "v must be", "on {device}", "on {elsewhere}"),
    Row("cache: transposed", lambda t: update(t(2, 64, 8).mT, t(2, 64, 8).mT, *caches(t, 2, 1, 64), 0),
        "k_cache must have a contiguous last dimension", "strides"),
    Row("cache: current_pos of words", lambda t: update(*caches(t, 2, 8, 64), *caches(t, 2, 1, 64), "1"),
        "current_pos must be an int", "got str '1'"),
    Row("task 5: a position per sequence",
        lambda t: layer(task5.CustomFlashAttention, t)(t(2, 1, 64), caches(t, 2, 9, 64), current_pos=t(2, dtype=I64)),
        "current_pos must be an int, the same for all sequences", "(2,) int64"),
    Row("task 5: decode with two tokens",
        lambda t: layer(task5.CustomFlashAttention, t)(t(2, 2, 64), caches(t, 2, 9, 64), decode=True),
        "one token", "got (2, 2, 64)"),
    Row("task 5: decode past the cache",
        lambda t: layer(task5.CustomFlashAttention, t)(t(2, 1, 64), caches(t, 2, 9, 64), decode=True, current_pos=9),
        "cache of 9", "current_pos 9"),
    Row("task 5: prompt longer than the cache",
        lambda t: layer(task5.CustomFlashAttention, t)(t(2, 10, 64), caches(t, 2, 9, 64)), "cache of 9", "10 new"),
    Row("task 5: head_dim over the limit",
        lambda t: layer(task5.CustomFlashAttention, t, 256, 1)(t(2, 3, 256), caches(t, 2, 9, 256)),
        "head_dim must be from 1 to 128", "got 256"),
    Row("task 5: decode, head_dim over the limit",
        lambda t: layer(task5.CustomFlashAttention, t, 256, 1)(t(2, 1, 256), caches(t, 2, 9, 256), decode=True),
        "head_dim must be from 1 to 128", "got 256"),
    Row("task 5: caches of another batch",
        lambda t: layer(task5.CustomFlashAttention, t)(t(2, 1, 64), caches(t, 3, 9, 64), decode=True),
        "k must be (3, n, 64)", "got (2, 1, 64)"),
    Row("task 5: bias of another width",
        lambda t: layer(task5.CustomFlashAttention, t, b_q=t(60)), "b_q must be (64,)", "got (60,)"),
]  # fmt: skip

TASK6 = [
    Row("RoPE: odd head_dim", lambda t: RoPE(15), "even", "got 15"),
    Row("RoPE: past the table", lambda t: RoPE(16, 100)(5, 96), "0 to 99", "5 positions from current_pos 96"),
    Row("RoPE: negative position", lambda t: RoPE(16, 100)(5, -1), "0 to 99", "current_pos -1"),
    Row("RoPE: table of another length", lambda t: apply_rotary_emb(t(2, 5, 4, 16), t(6, 8), t(6, 8)),
        "cos must be (5, 8)", "got (6, 8)"),
    Row("model: hidden_dim not divisible by num_heads", lambda t: customModel(64, 5, 1, 50, device=t.device),
        "hidden_dim must be a positive multiple of num_heads", "num_heads 5"),
    Row("model: head_dim over the limit", lambda t: customModel(512, 2, 1, 50, device=t.device), "to 128", "got 256"),
    Row("model: odd head_dim", lambda t: customModel(60, 4, 1, 50, device=t.device), "even", "got 15"),
    Row("model: no layers", lambda t: customModel(64, 4, 0, 50, device=t.device), "must be positive", "got 0, 50"),
    Row("model: x of rank 1", lambda t: model(t)(t.ids(5)), "x must be (batch, seq)", "got (5,)"),
    Row("model: x of floats", lambda t: model(t)(t(2, 5)), "int64 or int32", "float32"),
    Row("model: x elsewhere", lambda t: model(t)(t(2, 5, dtype=I64, on=t.elsewhere)), "on {device}", "on {elsewhere}"),
    Row("model: empty prompt", lambda t: model(t)(t.ids(2, 0), model_caches(t)), "at least one token", "got (2, 0)"),
    Row("model: id too large", lambda t: model(t)(t.ids(2, 5, highest=50), model_caches(t)), "0 to 49", "3 to 50"),
    Row("model: id negative", lambda t: model(t)(t.ids(2, 5, highest=-1), model_caches(t)), "0 to 49", "-1 to 3"),
    Row("model: prompt longer than its positions", lambda t: model(t)(t.ids(2, 21)), "20 positions", "21 tokens"),
    Row("model: prompt longer than the cache", lambda t: model(t)(t.ids(2, 13), model_caches(t)), "cache of 12", "13 new"),
    Row("model: current_pos negative", lambda t: model(t)(t.ids(2, 1), model_caches(t), -1), "20 positions", "current_pos -1"),
    Row("model: current_pos past the cache", lambda t: model(t)(t.ids(2, 1), model_caches(t), 12),
        "cache of 12", "current_pos 12"),
    Row("model: current_pos without a cache", lambda t: model(t)(t.ids(2, 1), None, 3), "needs the kv_cache", "got None"),
    Row("model: cache of another batch", lambda t: model(t)(t.ids(2, 1), model_caches(t, batch=3)),
        "k of layer 0 in kv_cache must be (2, 12, 64)", "got (3, 12, 64)"),
    Row("model: cache of another dtype", lambda t: model(t)(t.ids(2, 1), model_caches(t, dtype=F16)), "float32", "float16"),
    Row("model: a layer's cache missing", lambda t: model(t)(t.ids(2, 1), model_caches(t, layers=1)), "2 layers", "got 1"),
    Row("model: last layer's cache shorter", lambda t: model(t)(t.ids(2, 1), [*model_caches(t, layers=1), caches(t, 2, 9, 64)]),
        "k of layer 1 in kv_cache must be (2, 12, 64)", "got (2, 9, 64)"),
    Row("generate: empty prompt", lambda t: generate(model(t), t.ids(2, 0), 3), "at least one token", "got (2, 0)"),
    Row("generate: more than the positions", lambda t: generate(model(t), t.ids(2, 15), 6), "20 positions", "got", "6"),
    Row("attention: x of another width", lambda t: attention6(t)(t(2, 5, 60), caches(t, 2, 9, 64)), "(batch, seq, 64)", "60"),
    Row("attention: past the cache", lambda t: attention6(t)(t(2, 5, 64), caches(t, 2, 9, 64), 5), "cache of 9", "pos 5"),
    Row("attention: past the table", lambda t: attention6(t, 8)(t(2, 5, 64), caches(t, 2, 9, 64), 4), "0 to 7", "pos 4"),
    Row("attention: RoPE of another head_dim", lambda t: customAttention(64, 4, RoPE(32)), "head_dim 16", "for 32"),
]  # fmt: skip


def course_attention(*args: object, **options: object) -> object:
    from task7.attention import course_attention  # imports transformers, which takes seconds

    return course_attention(torch.nn.Module(), *args, **options)


def unknown_model(t: Given) -> object:
    from task7.inference import ModelWithCustomAttention

    return ModelWithCustomAttention("gpt-17", device=t.device)


@functools.cache
def gpt2(device: torch.device) -> object:
    from task7.inference import ModelWithCustomAttention

    return ModelWithCustomAttention("tiny", device=device)


TASK7 = [
    Row("GPT-2: unknown model name", unknown_model, "gpt-17", "gpt2, gpt2-medium"),
    Row("GPT-2: empty prompt", lambda t: gpt2(t.device).generate(""), "at least one character", "got ['']"),
    Row("GPT-2: no prompts", lambda t: gpt2(t.device).generate([]), "at least one character", "got []"),
    Row("GPT-2: prompt longer than its positions", lambda t: gpt2(t.device).generate("no " * 3000), "too long for", "positions"),
    Row("GPT-2: more tokens than positions", lambda t: gpt2(t.device).generate("Once", 5000), "leaves room for", "5000"),
    Row("GPT-2: head_dim over the limit", lambda t: course_attention(*(t(1, 2, 5, 256) for _ in "qkv"), None),
        "from 1 to 128", "got 256"),
    Row("GPT-2: dense mask", lambda t: course_attention(*(t(1, 2, 5, 64) for _ in "qkv"), t(1, 1, 5, 5)),
        "attention_mask", "got (1, 1, 5, 5)"),
    Row("GPT-2: kv heads do not divide", lambda t: course_attention(t(1, 4, 5, 64), *caches(t, 1, 3, 5, 64), None),
        "must divide", "4 and 3"),
]  # fmt: skip


def no_compiler(t: Given) -> object:
    t.patch.delenv("CXX", raising=False)
    t.patch.setenv("PATH", str(t.folder))
    return build([KERNEL], "cpu")


def no_cuda_compiler(t: Given) -> object:
    t.patch.setenv("CXX", shutil.which(toolchain.cpp_compiler().path))
    t.patch.delenv("NVCC", raising=False)
    t.patch.setenv("PATH", str(t.folder))
    t.patch.setattr(toolchain, "_pypi_nvccs", list)
    return build([KERNEL], "cuda", arch="sm_90a")


def fake_nvcc(t: Given, release: str, *architectures: int) -> None:
    path = t.folder / "nvcc"
    listed = "\n".join(f"echo compute_{n}" for n in architectures)
    path.write_text(
        '#!/bin/sh\nif [ "$1" = --version ]; then\n'
        f'echo "Cuda compilation tools, release {release}, V{release}.0"\nelse\n{listed}\nfi\n'
    )
    path.chmod(0o755)
    t.patch.setenv("NVCC", str(path))


def old_nvcc(t: Given) -> object:
    fake_nvcc(t, "11.8", 80, 90)
    return build([KERNEL], "cuda", arch="sm_120")


def old_driver(t: Given) -> object:
    fake_nvcc(t, "13.0", 80, 90)
    return toolchain.nvcc_for("sm_90a", (12, 4))


def no_gpu(t: Given) -> object:
    t.patch.setenv("CUDA_VISIBLE_DEVICES", "")
    return build([KERNEL], "cuda")


MACHINE = [
    Row("no compiler", no_compiler, "no C++ compiler found", "looked for", "g++", "Install", error=BuildError),
    Row("no CUDA compiler", no_cuda_compiler, "no CUDA compiler found", "nvcc on PATH", "PyPI", error=BuildError),
    Row("nvcc too old for the GPU", old_nvcc, "nvcc 11.8", "too old for sm_120", "sm_80 to sm_90", error=BuildError),
    Row("driver too old for nvcc", old_driver, "driver is too old", "up to CUDA 12.4", error=BuildError),
    Row("no GPU to build for", no_gpu, "no NVIDIA GPU found", "--arch", error=BuildError),
    Row("out of memory: the weights", lambda t: customModel(1 << 17, 1 << 10, 100, 50, device=t.device),
        "the weights need", "are free on {device}", error=NotEnoughMemory),
    Row("out of memory: the cache", lambda t: model(t).new_kv_cache(1 << 14, 1 << 22),
        "cache need", "are free on {device}", error=NotEnoughMemory),
    Row("out of memory: announced", lambda t: require_memory(1 << 60, t.device, "a universe"),
        "a universe needs 1073741824.0 GiB", "are free on {device}", error=NotEnoughMemory),
    Row("out of memory: a single sequence", lambda t: fit_batch(8, lambda batch: batch << 60, t.device, "a universe"),
        "needs 1073741824.0 GiB for a single sequence", "are free on {device}", error=NotEnoughMemory),
]  # fmt: skip

TABLE = [
    *(row for task, (layer_class, cache) in LAYERS.items() for row in _layer_rows(task, layer_class, cache)),
    *_qkv_rows("attention of task 2", task2.custom_attention),
    *_qkv_rows("attention of task 3", task3.flash_attention, limit=False),
    *_qkv_rows("attention of task 4", task4.custom_flash_attention),
    *_qkv_rows("decode of task 5", task5.custom_flash_attention_decode),
    *TASK2, *TASK3, *TASK4, *LADDER, *TASK5, *TASK6, *TASK7, *MACHINE,
]  # fmt: skip


@pytest.fixture
def fresh_toolchain():
    """Compilers and GPUs are looked for again, in what the row has made of this machine, and afterwards."""
    cached = (toolchain.cpp_compiler, toolchain.nvcc_for, toolchain.find_gpu)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("row", TABLE, ids=[row.name for row in TABLE])
def test_bad_input(row, device, monkeypatch, tmp_path, fresh_toolchain):
    launched = []
    monkeypatch.setattr(Kernels, "launch", lambda self, name, /, **arguments: launched.append(name))
    given = Given(device, monkeypatch, tmp_path)
    with pytest.raises(row.error) as caught:
        row.call(given)
    assert type(caught.value) is row.error, (
        f"a {type(caught.value).__name__} is not meant for users"
    )
    message = str(caught.value)
    for words in row.says:
        words = words.format(device=given.device, elsewhere=given.elsewhere)
        assert words in message, f"the message should say '{words}'; it says: {message}"
    assert not launched, f"{launched} ran before the error"
    assert not given.changed(), "a tensor that the call was given has changed"


@pytest.mark.parametrize("device", DEVICES)
def test_pytorch_out_of_memory_says_what_is_needed_and_free(device):
    """An allocation without a check of the memory before it, as python -m taskN.test reports it."""
    try:
        torch.empty(1 << 50, dtype=torch.uint8, device=device)
    except RuntimeError as error:  # torch.OutOfMemoryError on a GPU
        message = describe_out_of_memory(error, torch.device(device))
    assert "out of memory" in message and "allocate" in message and "free" in message, message
    assert len(message) < 400, "PyTorch's own page of advice is not for here"
