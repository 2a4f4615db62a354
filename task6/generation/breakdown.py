"""Where the time of a step goes, kernel by kernel."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from task6.generation.decoder import Decoder

STEPS = 10  # that are looked at
GAPS = "between kernels"
PRODUCTS = ("q, k, v", "o", "gate, up", "down")  # of a layer, in their order
LOGITS = "logits"
KINDS = {  # by what is in a kernel's name
    "append, RoPE": "append_kernel",
    "attention": r"(^|\b|_)(decode|attention)_kernel|flash|fmha",
    "SwiGLU": "swiglu",
    "norm": "rms_norm",
    "product": r"product_kernel|tensor_core_kernel|float_kernel|gem[mv]|cutlass|cublas|nvjet|split_?k",
    "sum of processes": "nccl|all_?reduce",
    "sampling": "argmax",
    "embedding": "gather|index_?select",
}


@dataclass(frozen=True)
class Part:
    """A part of a step.

    Args:
        name: what it does.
        kernel: the kernel's own name.
        calls: in a step.
        us: microseconds of a step.
        bytes: that they have to read and write in a step; None where they are not counted.
    """

    name: str
    kernel: str
    calls: float
    us: float
    bytes: float | None = None

    def floor(self, read_gb_per_s: float) -> float | None:
        """Microseconds in which a pure read of its bytes is done."""
        return self.bytes and self.bytes / read_gb_per_s / 1e3


def breakdown(decoder: Decoder, prompt: Tensor) -> list[Part]:
    """The parts of a step after this prompt, token ids ``(batch, seq)``; the longest first.

    On a GPU they are kernels, and the time between them. Where kernels overlap, a later one's time begins when those
    before it have ended, so that the parts add up. On a CPU they are PyTorch's operators, each without those that it
    calls; our own kernels are not among them.
    """
    decoder.generate(prompt, 2)
    cuda = prompt.is_cuda
    activity = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        for _ in range(STEPS):
            decoder.step()
        if cuda:
            torch.cuda.synchronize()
    if cuda:
        ran = [
            (event.name, event.time_range.start, event.time_range.end)
            for event in profiler.events()
            if event.device_type == DeviceType.CUDA and not event.is_user_annotation
        ]
        moved = part_bytes(decoder, prompt.shape[1] + 1 + STEPS / 2)
        return parts_of(ran, STEPS, decoder.config.layers, moved)
    found = [
        Part(event.key, "", event.count / STEPS, event.self_cpu_time_total / STEPS)
        for event in profiler.key_averages()
        if event.self_cpu_time_total > 0
    ]
    return sorted(found, key=lambda part: -part.us)


def phases(decoder: Decoder, prompt: Tensor, step_us: float) -> list[Part]:
    """The parts of a step in one launch after this prompt, as one of its blocks saw them.

    A part ends when all blocks have met behind it; that of q, k and v, where they do not meet, when this block has left
    its own, so that attention's includes the wait for the others'.

    Args:
        decoder: with a persistent step.
        prompt: token ids ``(batch, seq)``.
        step_us: microseconds of a step, which the clock's cycles are shares of.
    """
    decoder.generate(prompt, 1)
    step, layers = decoder.one_launch, decoder.config.layers
    spans = torch.stack([step.clocks().diff() for _ in range(STEPS)]).double().mean(0).cpu()
    spans *= step_us / spans.sum()
    of_layers = spans[1:-1].view(layers, 5).sum(0).tolist()
    us = dict(zip((*PRODUCTS[:1], "attention", *PRODUCTS[1:]), of_layers, strict=True))
    us |= {"embedding": spans[0].item(), LOGITS: spans[-1].item()}
    moved = part_bytes(decoder, prompt.shape[1] + 1 + STEPS / 2)
    return [
        Part(name, "", 1 if name in ("embedding", LOGITS) else layers, time, moved.get(name))
        for name, time in sorted(us.items(), key=lambda part: -part[1])
    ]


def parts_of(
    ran: Sequence[tuple[str, float, float]], steps: int, layers: int, moved: dict[str, float]
) -> list[Part]:
    """The parts of one of several equal steps.

    Args:
        ran: name, begin and end, in microseconds, of each kernel.
        steps: how many there were.
        layers: of the model.
        moved: bytes of a part, by its name.
    """
    ran = sorted(ran, key=lambda kernel: kernel[1])
    names = _names([name for name, _, _ in ran], steps, layers)
    us: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    kernels: dict[str, Counter[str]] = {}
    done = ran[0][1] if ran else 0.0  # all that began before has ended
    for name, (kernel, begin, end) in zip(names, ran, strict=True):
        us[GAPS] += max(0.0, begin - done)
        us[name] += max(0.0, end - max(begin, done))
        calls[name] += 1
        kernels.setdefault(name, Counter())[short_name(kernel)] += 1
        done = max(done, end)
    found = [
        Part(
            name, kernels[name].most_common(1)[0][0] if name in kernels else "", calls[name] / steps, time / steps,
            moved.get(name),
        )
        for name, time in us.items()
    ]  # fmt: skip
    return sorted(found, key=lambda part: -part.us)


def part_bytes(decoder: Decoder, length: float) -> dict[str, float]:
    """Bytes that the parts of a step have to read and write, by name, where each sequence has ``length`` positions.

    Activations are left out beside weights, keys and values.
    """
    c, w = decoder.config, decoder.weights
    size = w.embedding.element_size()

    def of_layers(name: str) -> int:
        return size * sum(getattr(layer, name).numel() for layer in w.layers)

    matrices = (of_layers(name) for name in ("qkv", "o", "gate_up", "down"))
    moved: dict[str, float] = dict(zip(PRODUCTS, matrices, strict=True))
    moved[LOGITS] = size * w.lm_head.numel()
    moved["product"] = sum(moved.values())  # where they cannot be told apart
    moved["attention"] = size * c.cache(decoder.batch, 1) * length
    moved["append, RoPE"] = 2 * size * decoder.batch * c.layers * c.qkv_rows
    moved["sampling"] = size * decoder.logits.numel()
    moved["embedding"] = 2 * size * decoder.batch * c.hidden
    return moved


def _names(kernels: Sequence[str], steps: int, layers: int) -> list[str]:
    """What each kernel does. The products of a layer are told apart by their order."""
    names = [_kind(kernel) for kernel in kernels]
    each = len(PRODUCTS) * layers + 1
    if names.count("product") != steps * each:
        return names
    order = [*PRODUCTS * layers, LOGITS] * steps
    products = iter(order)
    return [next(products) if name == "product" else name for name in names]


def _kind(kernel: str) -> str:
    found = (name for name, words in KINDS.items() if re.search(words, kernel, re.IGNORECASE))
    return next(found, short_name(kernel))


def short_name(kernel: str) -> str:
    """A kernel's name without its type, namespaces and arguments: ``reduce_kernel``."""
    name = kernel.replace("(anonymous namespace)::", "").removeprefix("void ")
    return re.split(r"[<(]", name, maxsplit=1)[0].split("::")[-1].strip() or kernel
