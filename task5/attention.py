"""Task 5: attention with a KV cache: prompts through task 4's kernel, single tokens through your decode kernel."""

import functools
import math

import torch
from torch import Tensor

from common.build import Kernels, dtype_code
from common.inputs import (
    check_attention,
    check_cache,
    check_head_dim,
    check_lengths,
    describe,
    heads_view,
    kv_heads_of,
)
from common.layer import AttentionLayer
from task4.prefill import fast_attention

BLOCKS_PER_SM = 4  # of the decode kernel that an SM holds at once, by its registers
MIN_KEYS_PER_SPLIT = 128  # with fewer, merging the splits costs more than it gains

_kernels = Kernels(__file__, "attention_kernel.cu")


def update_kv_cache(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, current_pos: int | Tensor
) -> None:
    """Write k and v into the caches at ``current_pos``, in place.

    Args:
        k_cache, v_cache: ``(batch, max_seq_len, hidden)``.
        k, v: ``(batch, n, hidden)``, the caches' dtype and device.
        current_pos: where the first of the n rows goes: one int for all sequences, or int32 ``(batch,)`` on the
            device, one per sequence. Positions on the device cannot be checked before the launch: rows outside the
            cache are not written.

    Raises:
        ValueError: arguments that do not fit, or an int ``current_pos`` outside the cache; nothing is written.
    """
    check_cache(k_cache, v_cache, k, v)
    on_device = isinstance(current_pos, Tensor)
    if on_device:
        check_lengths("current_pos", current_pos, k_cache)
    else:
        check_position(current_pos, n=k.shape[1], max_seq_len=k_cache.shape[1])
    if k.numel():
        _kernels.launch(
            "update_kv_cache", k_cache=k_cache, v_cache=v_cache, k=k, v=v,
            positions=current_pos if on_device else None, current_pos=0 if on_device else current_pos,
            dtype=dtype_code(k.dtype),
        )  # fmt: skip


def check_position(current_pos: int, n: int, max_seq_len: int) -> None:
    """ValueError unless rows ``current_pos ... current_pos + n`` are inside a cache of ``max_seq_len``."""
    if not isinstance(current_pos, int):
        raise ValueError(f"current_pos must be an int; got {describe(current_pos)}")
    if n > max_seq_len:
        raise ValueError(f"{n} new positions do not fit a cache of {max_seq_len}")
    if current_pos < 0 or current_pos + n > max_seq_len:
        raise ValueError(
            f"{n} new positions from current_pos {current_pos} do not fit a cache of {max_seq_len}; "
            f"current_pos must be from 0 to {max_seq_len - n}"
        )


def choose_num_splits(blocks: int, kv_len: int, sms: int) -> int:
    """How many blocks share the keys of one (sequence, head): 1 where ``blocks`` = batch * heads fill the GPU.

    The smallest number of splits that fills the waves of blocks at least 85 % as well as the best one, with at least
    ``MIN_KEYS_PER_SPLIT`` keys per split. (The rule of FlashDecoding in the FlashAttention library.)
    """
    slots = sms * BLOCKS_PER_SM
    # BEGIN SOLUTION, until then: return 1
    return _fewest_splits(blocks, slots, limit=max(1, min(kv_len // MIN_KEYS_PER_SPLIT, slots)))
    # END SOLUTION


@functools.cache
def _fewest_splits(blocks: int, slots: int, limit: int) -> int:
    # BEGIN SOLUTION
    waves = [blocks * splits / slots for splits in range(1, limit + 1)]
    fullness = [w / math.ceil(w) for w in waves]
    return next(i for i, f in enumerate(fullness, start=1) if f >= 0.85 * max(fullness))
    # END SOLUTION


def flash_attention_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    seqlens_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """One query per sequence against a cache of keys and values, which is read in place.

    Args:
        q: ``(batch, 1, heads, head_dim)``, float32, float16 or bfloat16, head_dim at most 128.
        k, v: ``(batch, kv_len, kv_heads, head_dim)``, any strides with a contiguous last dimension.
        scale: factor of the scores; ``1 / sqrt(head_dim)`` if None.
        seqlens_k, leftpad_k: int32 ``(batch,)`` on the device: sequence b reads the keys
            ``leftpad_k[b] <= j < seqlens_k[b]``. Default: all.
        num_splits: blocks that share the keys of one head (FlashDecoding); :func:`choose_num_splits` if None.

    Returns:
        ``(batch, 1, heads, head_dim)``, contiguous. A sequence without keys gives 0.

    Raises:
        ValueError: arguments that do not fit, named.
    """
    batch, heads, kv_heads, q_len, kv_len, head_dim = check_attention(q, k, v)
    if q_len != 1:
        raise ValueError(
            f"decoding takes one query per sequence: q must be (batch, 1, ...); got q_len {q_len}"
        )
    check_lengths("seqlens_k", seqlens_k, q)
    check_lengths("leftpad_k", leftpad_k, q)
    if num_splits is not None and not 1 <= num_splits <= max(kv_len, 1):
        raise ValueError(f"num_splits must be from 1 to kv_len {kv_len}; got {num_splits}")
    # naming the format costs 0.4 us
    like = {} if q.is_contiguous() else {"memory_format": torch.contiguous_format}
    out = torch.empty_like(q, **like)
    if kv_len == 0:
        return out.zero_()
    if not (batch and heads):
        return out
    if num_splits is None:
        num_splits = choose_num_splits(batch * heads, kv_len, sm_count(q.device))
    partial_out = partial_lse = None
    if num_splits > 1:
        parts = dict(dtype=torch.float32, device=q.device)
        partial_out = torch.empty(size=(batch, heads, num_splits, head_dim), **parts)
        partial_lse = torch.empty(size=(batch, heads, num_splits), **parts)
    _kernels.launch(
        "flash_attention_decode", q=q, k=k, v=v, out=out, partial_out=partial_out, partial_lse=partial_lse,
        seqlens_k=seqlens_k, leftpad_k=leftpad_k, num_splits=num_splits,
        scale=1 / math.sqrt(head_dim) if scale is None else scale, dtype=dtype_code(q.dtype),
    )  # fmt: skip
    return out


@functools.cache
def sm_count(device: torch.device) -> int:
    """How many SMs a GPU has; 1 for the CPU, where splitting gains nothing."""
    if device.type == "cpu":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def custom_flash_attention_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_heads: int,
    causal: bool = False,
    **lengths: Tensor | int | None,
) -> Tensor:
    """:func:`flash_attention_decode` on ``(batch, seq, num_heads * head_dim)`` tensors; q has one row.

    ``causal`` changes nothing: the causal mask ends at the last key, and the one query is the last position. Further
    keywords are :func:`flash_attention_decode`'s.

    Raises:
        ValueError: arguments that do not fit, named.
    """
    q_heads = heads_view("q", q, num_heads)
    kv_heads = kv_heads_of(q_heads, k)
    out = flash_attention_decode(
        q_heads, heads_view("k", k, kv_heads), heads_view("v", v, kv_heads), **lengths
    )
    return out.flatten(2)


class CustomFlashAttention(AttentionLayer):
    """Multi-head self-attention that reads and extends a KV cache."""

    def forward(
        self,
        x: Tensor,
        kv_cache: tuple[Tensor, Tensor],
        decode: bool = False,
        current_pos: int = 0,
        causal: bool = False,
    ) -> Tensor:
        """Append x's keys and values to the cache at ``current_pos``; x attends to the cache up to its own end.

        Args:
            x: ``(batch, seq, hidden_dim)``: a prompt, a chunk of one, or (``decode=True``) one token per sequence.
            kv_cache: ``(k_cache, v_cache)``, each ``(batch, max_seq_len, hidden_dim)``; extended in place.
            decode: use the decode kernel; seq must be 1.
            current_pos: how many positions of the cache are filled.
            causal: row i of x sees the cache up to position ``current_pos + i``.

        Returns:
            ``(batch, seq, hidden_dim)``.

        Raises:
            ValueError: arguments that do not fit; the cache is then untouched.
        """
        seq = x.shape[1] if x.dim() == 3 else 0
        if decode and seq != 1:
            raise ValueError(
                f"decode=True takes one token per sequence, x (batch, 1, hidden_dim); got {tuple(x.shape)}"
            )
        check_head_dim(self.head_dim)  # before anything is written
        k_cache, v_cache = kv_cache
        if isinstance(current_pos, Tensor):
            raise ValueError(
                f"current_pos must be an int, the same for all sequences; got {describe(current_pos)}"
            )
        q, k, v = self.project_qkv(x)
        # BEGIN SOLUTION
        update_kv_cache(k_cache, v_cache, k, v, current_pos)
        end = current_pos + seq
        # (batch, seq or end, heads, head_dim): views, the cache is read in place
        heads = (self.num_heads, self.head_dim)
        q, k, v = (t.unflatten(-1, heads) for t in (q, k_cache[:, :end], v_cache[:, :end]))
        # the one query of a decode step sees every key: nothing to mask
        o = flash_attention_decode(q, k, v) if decode else fast_attention(q, k, v, causal=causal)
        o = o.flatten(2)
        # END SOLUTION
        return self.project_output(o)
