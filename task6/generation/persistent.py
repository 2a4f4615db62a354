"""A decode step of a whole model in one launch: ``persistent.cu``."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.build import Kernels, dtype_code, touching
from common.inputs import describe, expect
from task5.ladder.gpu import is_hopper, sms_of
from task6.generation.parallel import Group
from task6.generation.product import ACTIVATIONS, LINE

MAX_ROWS = 8
MAX_LAYERS = 80
HEAD_DIMS = (64, 128)
MOST_HEADS = 4  # of a group, that share a read of its keys
FEWEST_KEYS = 32  # of a block
MOST_GPUS = 8
TENSOR_MAP = 128  # bytes
PACE = 0.6  # of the memory's peak, at which L2 is filled ahead: at all of it steps of an H200 take up to 1.4 x the time
COUNTERS = (
    3 * 32
)  # blocks that come to a meeting, and that are done, and steps: in lines of memory of their own
MATRICES = ("qkv", "o", "up", "down")
LAYER = ("norm_1", "qkv_sums", "qkv_bias", "o_bias", "norm_2", "up_sums", "up_bias", "down_bias")
_KERNELS = Kernels(__file__, "persistent.cu")  # of GPUs, for Hopper


@dataclass(frozen=True)
class StepModel:
    """What a step reads.

    Attributes:
        layers: tensors by the names of MATRICES and LAYER; what a model does not have is missing. Matrices are
            ``(N, K)``, and with SwiGLU ``up`` has the rows of gate, then those of up. ``*_sums`` make a norm a layer
            norm, as in :func:`task6.generation.product.product`.
        k_cache, v_cache: ``(layers, batch, max_seq, kv_heads, head_dim)``, each layer's part contiguous.
        embedding: ``(vocab, hidden)``.
        norm, head: ``(hidden,)`` and ``(vocab, hidden)``; head_sums, head_bias: ``(vocab,)``, or None.
        heads: query heads.
        activation: "swiglu" or "gelu".
        eps: of the norms.
        positions: ``(max_seq, hidden)``, added to the embedding; None with RoPE.
        cos, sin: float32 ``(max_seq, head_dim / 2)``; None without RoPE.
    """

    layers: Sequence[Mapping[str, Tensor | None]]
    k_cache: Tensor
    v_cache: Tensor
    embedding: Tensor
    norm: Tensor
    head: Tensor
    heads: int
    activation: str
    eps: float
    head_sums: Tensor | None = None
    head_bias: Tensor | None = None
    positions: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None


def why_not(model: StepModel, lengths: Tensor, group: Group | None = None) -> str | None:
    """Why a persistent step does not take a model or a batch, in a sentence; None where it does.

    Args:
        model: what a step would read.
        lengths: ``(batch,)``, on the device that it would run on.
        group: the processes that share the model; None: this one alone.
    """
    group, rows, device = group or Group(), len(lengths), lengths.device
    k_cache, v_cache = model.k_cache, model.v_cache
    *_, kv_heads, head_dim = k_cache.shape
    if not 1 <= rows <= MAX_ROWS:
        return f"a persistent step takes from 1 to {MAX_ROWS} sequences; got {rows}"
    if lengths.is_cuda and not is_hopper(device):
        return f"of GPUs, a persistent step runs on Hopper alone; got tensors on {device}"
    if group.world > MOST_GPUS:
        return f"a persistent step is of up to {MOST_GPUS} processes; got {group.world}"
    if len(model.layers) > MAX_LAYERS:
        return f"a persistent step takes up to {MAX_LAYERS} layers; got {len(model.layers)}"
    if head_dim not in HEAD_DIMS:
        return f"head_dim must be one of {HEAD_DIMS}; got {head_dim}"
    if model.heads % kv_heads:
        return f"kv_heads must divide heads; got {kv_heads} and {model.heads}"
    if model.activation == "swiglu" and any(
        layer.get(name) is not None for layer in model.layers for name in ("up_sums", "up_bias")
    ):
        return "swiglu has neither up_sums nor up_bias"
    tensors = [t for layer in model.layers for t in layer.values()]
    tensors += [model.embedding, model.norm, model.head, model.head_sums, model.head_bias]
    tensors += [k_cache[0], v_cache[0], model.positions]
    for t in [t for t in tensors if t is not None]:
        if not t.is_contiguous() or (t.dtype, t.device) != (model.embedding.dtype, device):
            return "a persistent step takes contiguous tensors of one dtype and device"
        if t.data_ptr() % 16 or (t.dim() > 1 and t.shape[-1] * t.element_size() % LINE):
            return f"tensors must begin at multiples of 16 bytes, their rows of {LINE}; got {describe(t)}"
    if k_cache.stride() != v_cache.stride() or k_cache.stride(0) % k_cache.stride(1):
        return (
            "layers of k_cache and v_cache must be whole sequences apart, as far in both; got strides"
            f" {k_cache.stride()} and {v_cache.stride()}"
        )
    return None


def by_default(model: StepModel, lengths: Tensor, group: Group | None = None) -> bool:
    """Whether a decoder's step is one launch where its caller does not say: on GPUs, and where the kernel takes it.

    On a CPU it takes long. Several GPUs have to reach each other's memory. Arguments as for :func:`why_not`; all
    processes of a group get the same answer.
    """
    reachable = group is None or group.world == 1 or group.shares_memory
    return lengths.is_cuda and reachable and why_not(model, lengths, group) is None


def _bytes_per_cycle(device: torch.device) -> float:
    """At what pace L2 is filled ahead: PACE of what the memory delivers at most, in a cycle of the SMs.

    Without a GPU, or where one does not say its clocks, so much that it takes no time.
    """
    if device.type == "cpu":
        return math.inf
    gpu = torch.cuda.get_device_properties(device)
    both_edges = 2 * gpu.memory_clock_rate * gpu.memory_bus_width / 8
    return PACE * both_edges / gpu.clock_rate if both_edges and gpu.clock_rate else math.inf


class PersistentStep:
    """A step of a model: called, it advances these buffers, in one launch. Of GPUs, for Hopper; the CPU can check it.

    Args:
        model: of float32, float16 or bfloat16 tensors, each contiguous, with head_dim 64 or 128.
        tokens: int64, one per sequence, up to 8: the newest ones. They become the next ones.
        lengths: int32 ``(batch,)``, positions of the caches that are filled. Each grows by one; the caller sees to it
            that there is room.
        logits: ``(batch, vocab)``, from which the next tokens are taken.
        group: the processes that share the model, each with heads, columns of the MLP and rows of ``head``; all of
            them step together. None: this one alone.
        blocks: no more than the GPU holds at once, one on each SM; that many if None, and a few without a GPU.

    Raises:
        ValueError: what :func:`why_not` names, buffers that do not fit the model, or GPUs with no way to each other's
            memory.
    """

    def __init__(
        self,
        model: StepModel,
        tokens: Tensor,
        lengths: Tensor,
        logits: Tensor,
        *,
        group: Group | None = None,
        blocks: int | None = None,
    ) -> None:
        group = group or Group()
        if reason := why_not(model, lengths, group):
            raise ValueError(reason)
        first, rows = model.layers[0], len(lengths)
        k_cache, v_cache = model.k_cache, model.v_cache
        (_, _, max_seq, kv_heads, head_dim), hidden = k_cache.shape, model.embedding.shape[1]
        place = dict(device=lengths.device, dtype=model.embedding.dtype)
        expect("logits", logits, shape=(rows, len(model.head)), **place)
        for name, columns in (
            ("cos", head_dim // 2),
            ("sin", head_dim // 2),
            ("positions", hidden),
        ):
            if (t := getattr(model, name)) is None:
                continue
            dtype = place["dtype"] if name == "positions" else torch.float32
            expect(name, t, shape=("max_seq", columns), dtype=dtype, device=place["device"])
            if len(t) < max_seq:
                raise ValueError(f"{name} must have the cache's {max_seq} rows; got {len(t)}")
        if not all(t.is_contiguous() for t in (logits, model.cos, model.sin) if t is not None):
            raise ValueError("logits, cos and sin must be contiguous")
        if blocks is None:
            blocks = sms_of(lengths.device)
        shared_by = min(model.heads // kv_heads, MOST_HEADS)
        pairs = rows * kv_heads * math.ceil(model.heads // kv_heads / MOST_HEADS)
        splits = max(1, min(blocks // pairs, math.ceil(max_seq / FEWEST_KEYS)))
        wide = first["up"].shape[0] // (2 if model.activation == "swiglu" else 1)
        addresses = [
            [0 if layer.get(name) is None else layer[name].data_ptr() for name in LAYER]
            for layer in model.layers
        ]
        inboxes = group.inboxes(2 * group.world * rows * (hidden + 1), lengths.device)
        matrices = [layer[name] for layer in model.layers for name in MATRICES] + [model.head]
        maps = torch.empty(len(matrices), TENSOR_MAP, dtype=torch.uint8, device=lengths.device)
        for w, map in zip(matrices, maps, strict=True):
            _KERNELS.launch("map_weights", w=w, map=map, dtype=dtype_code(place["dtype"]))
        # The kernel has their addresses only.
        self._behind = {
            f"{name}_{i}": t for i, layer in enumerate(model.layers) for name, t in layer.items()
        } | {"k_caches": k_cache, "v_caches": v_cache}
        self._behind |= {f"inbox_{rank}": inbox for rank, inbox in enumerate(inboxes)}

        def buffer(columns: int, tagged: bool = rows == 1) -> Tensor:
            """Of results: some have a tag beside each, and no place has one that is written to it first."""
            return torch.zeros(rows, columns, *(2,) * tagged, **place)

        # Three neighbours of these are a range to the kernel.
        widths = dict(x_even=hidden, x_within=hidden, inner=wide, x_odd=hidden)
        parts = torch.split(
            buffer(sum(widths.values())).flatten(0, 1), [rows * n for n in widths.values()]
        )
        places = {n: t.unflatten(0, (rows, -1)) for n, t in zip(widths, parts, strict=True)}

        self.arguments = dict(
            layers=torch.tensor(addresses, device=lengths.device), maps=maps, layer_count=len(model.layers),
            embedding=model.embedding, positions=model.positions, norm=model.norm, head=model.head,
            head_sums=model.head_sums, head_bias=model.head_bias, cos=model.cos, sin=model.sin,
            **places, qkv=buffer(first["qkv"].shape[0], tagged=True), o=buffer(model.heads * head_dim), logits=logits,
            partial=torch.zeros(pairs * splits * shared_by * (head_dim + 2), 2, device=lengths.device),
            best=torch.zeros(rows, dtype=torch.int64, device=lengths.device),
            counters=torch.zeros(COUNTERS + pairs, dtype=torch.int32, device=lengths.device), lengths=lengths,
            tokens=tokens, clocks=None, k_cache=k_cache[0], v_cache=v_cache[0],
            layer_stride=k_cache.stride(0) // k_cache.stride(1), rank=group.rank, gpus=group.world,
            inboxes=torch.tensor([t.data_ptr() for t in inboxes], device=lengths.device) if inboxes else None,
            heads=model.heads, activation=ACTIVATIONS.index(model.activation), splits=splits, eps=model.eps,
            scale=1 / math.sqrt(head_dim), bytes_per_cycle=_bytes_per_cycle(lengths.device),
            blocks=blocks, dtype=dtype_code(place["dtype"]),
        )  # fmt: skip

    def __call__(self) -> None:
        """Advance by one token."""
        with touching(**self._behind):
            _KERNELS.launch("step", **self.arguments)

    def clocks(self) -> Tensor:
        """Advance by one token, and say when: int64 ``(5 * layers + 3,)``, cycles of block 0's SM.

        At the beginning; when all blocks had met after the embedding, and after each layer's attention, o, and first
        and second product of the MLP; when the block had left its q, k and v, behind which no blocks meet; and when it
        was done with the logits. On the CPU they are nanoseconds.
        """
        layers, device = self.arguments["layer_count"], self.arguments["lengths"].device
        clocks = torch.zeros(5 * layers + 3, dtype=torch.int64, device=device)
        with touching(**self._behind):
            _KERNELS.launch("step", **self.arguments | dict(clocks=clocks))
        return clocks
