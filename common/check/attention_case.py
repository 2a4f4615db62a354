"""The case of an attention check: what q, k and v are like, and what each query sees."""

import mmap
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from common.check.case import Case
from common.check.poison import hide_
from common.check.rng import Rng

BEHIND = 100  # rows of a cache after those that are read
_OF_EVERY_CASE = ("name", "why", "small", "devices")


@dataclass(frozen=True, kw_only=True, repr=False)
class AttentionCase(Case):
    """One input of an attention check. A suite that needs more adds fields in a subclass.

    Args:
        name, why, small, devices: see :class:`Case`.
        q_len, head_dim: of q.
        kv_len: as many keys as queries if None.
        batch, heads: sequences, and heads of q.
        kv_heads: heads of k and v; as many as q has if None.
        dtype: of q, k and v.
        causal: query i sees the keys ``j <= i + kv_len - q_len``.
        seqlens: how many keys each sequence has; None: all of them.
        leftpad: how many keys of each sequence are padding at its start; None: none.
        layout: of q, k and v in memory, see :func:`lay_out`.
        scale: factor of the scores; 1 / sqrt(head_dim) if None.
        magnitude: factor of q and of k; the scores grow with its square.
        opposed: added to every element of q, subtracted from every one of k: the scores are around
            -opposed^2 sqrt(head_dim).
        huge_key: a key that is 100 times as large as the others.
        v_mean: added to every element of v.
    """

    name: str = field(kw_only=False)
    why: str
    small: bool = False
    devices: tuple[str, ...] = ("cpu", "cuda")
    q_len: int
    head_dim: int
    kv_len: int | None = None
    batch: int = 2
    heads: int = 2
    kv_heads: int | None = None
    dtype: torch.dtype = torch.float32
    causal: bool = False
    seqlens: tuple[int, ...] | None = None
    leftpad: tuple[int, ...] | None = None
    layout: str = "contiguous"
    scale: float | None = None
    magnitude: float = 1.0
    opposed: float = 0.0
    huge_key: int | None = None
    v_mean: float = 0.0

    def __post_init__(self) -> None:
        own = {f.name: f.default for f in fields(self) if f.name not in _OF_EVERY_CASE}
        given = {name: getattr(self, name) for name in own}
        # What a failure shows of the case: the fields that differ from their defaults.
        values = {name: value for name, value in given.items() if value != own[name]}
        kv_len = self.q_len if self.kv_len is None else self.kv_len
        kv_heads = self.heads if self.kv_heads is None else self.kv_heads
        self.__dict__.update(values=values, kv_len=kv_len, kv_heads=kv_heads)

    @property
    def large_scores(self) -> bool:
        """Whether scores are in the hundreds: where the two best keys of a row nearly tie, rounding shows."""
        return self.magnitude > 1 or self.huge_key is not None

    def qkv(self, rng: Rng) -> tuple[Tensor, Tensor, Tensor]:
        """q ``(batch, q_len, heads, head_dim)`` and k, v ``(batch, kv_len, kv_heads, head_dim)``, laid out."""
        return lay_out(self.layout, *self.numbers(rng))

    def numbers(self, rng: Rng) -> tuple[Tensor, Tensor, Tensor]:
        """The same, contiguous; for a subclass that changes them."""

        def randn(length: int, heads: int, scale: float, shift: float) -> Tensor:
            shape = (self.batch, length, heads, self.head_dim)
            return rng.randn(*shape, dtype=self.dtype, scale=scale, shift=shift)

        q = randn(self.q_len, self.heads, self.magnitude, self.opposed)
        k = randn(self.kv_len, self.kv_heads, self.magnitude, -self.opposed)
        if self.huge_key is not None:
            k[:, self.huge_key] *= 100
        return q, k, randn(self.kv_len, self.kv_heads, 1.0, self.v_mean)

    def visible(self, device: torch.device) -> dict[str, Any]:
        """What the queries see, and the scale if there is one: keywords of an attention."""
        lengths = {"seqlens_k": self.seqlens, "leftpad_k": self.leftpad}
        scale = {} if self.scale is None else {"scale": self.scale}
        return (
            {"causal": self.causal}
            | scale
            | {
                name: torch.tensor(values, dtype=torch.int32, device=device)
                for name, values in lengths.items()
                if values is not None
            }
        )


def lay_out(layout: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same numbers in another layout: ``(batch, length, heads, head_dim)`` each.

    contiguous    as they are
    fused         slices of one tensor, as one projection gives them: rows of q, k and v are 3 hidden_dim apart
    heads first   ``(batch, heads, length, head_dim)`` in memory, as Hugging Face has it
    odd           rows that start at odd addresses
    odd v         rows of v alone start at odd addresses, 4 elements more than a row apart
    cache         k and v are the first rows of longer buffers, followed by NaN
    apart         q, k and v have different strides
    expanded      the first head of k and of v stands for all: a stride of 0
    far           rows 2^24 elements apart and sequences 2^31; q, k and v side by side, with as many heads
    """
    if layout == "contiguous":
        return q, k, v
    if layout == "fused":
        return torch.stack((q, k, v), dim=2).unbind(2)
    if layout == "heads first":
        return tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    if layout == "odd":
        return tuple(pad(t, (1, 2))[..., 1:-2] for t in (q, k, v))
    if layout == "odd v":
        return q, k, pad(v, (1, 3))[..., 1:-3]
    if layout == "cache":
        longer = [pad(t, (0, 0, 0, 0, 0, BEHIND)) for t in (k, v)]
        for t in longer:
            hide_(t[:, k.shape[1] :])
        return q, *(t[:, : k.shape[1]] for t in longer)
    if layout == "apart":
        # As many elements more in each row, each head and each sequence as no other has.
        return tuple(
            pad(t, (0, 4 * i, 0, i, 0, 3 - i))[:, : t.shape[1], : t.shape[2], : t.shape[3]]
            for i, t in enumerate((q, k, v))
        )
    if layout == "expanded":
        return q, *(t[:, :, :1].expand_as(t) for t in (k, v))
    if layout == "far":
        batch, _, heads, d = q.shape
        rows = max(q.shape[1], k.shape[1])
        store = _far_store(q, (batch - 1 << 31) + (rows << 24) + 3 * heads * d)
        starts = ((t, i * heads * d) for i, t in enumerate((q, k, v)))
        return tuple(
            store.as_strided(t.shape, (1 << 31, 1 << 24, d, 1), store.storage_offset() + i).copy_(t)
            for t, i in starts
        )
    raise ValueError(f"there is no layout {layout!r}")


def _far_store(like: Tensor, elements: int) -> Tensor:
    """Uninitialised memory. On the CPU only what is touched is taken; an offset cut to 32 bits ends in it, too."""
    if like.device.type != "cpu":
        return like.new_empty(elements)
    before = 1 << 31  # elements: so far back leads an int that has overflowed
    size = (before + elements) * like.element_size()
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return torch.frombuffer(mmap.mmap(-1, size, kind), dtype=like.dtype)[before:]
