"""A case: the decoder and what it is compared with, timed in turns in one run, and the memory that it takes."""

import gc
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from common.check.case import device_of
from common.dtypes import dtype_name
from common.products.fp32 import can_split
from task5.ladder.benchmark import reason_of
from task6.generation.breakdown import STEPS, Part, breakdown, phases
from task6.generation.config import Config, find_config
from task6.generation.decoder import ROWS, Decoder
from task6.generation.measure import Speed, generate, measure, same_tokens, step_bytes
from task6.generation.parallel import Group, processes_here
from task6.generation.peers import ONE_LAUNCH, Make
from task6.generation.weights import Weights, expect_room

OURS = "the decoder"
DTYPES = {dtype_name(t): t for t in (torch.float32, torch.float16, torch.bfloat16)}


@dataclass(frozen=True)
class Case:
    """What is generated.

    Raises:
        ValueError: no such configuration or dtype, or sizes that are not positive.
    """

    config: str
    batch: int
    prompt: int  # tokens of each prompt
    new_tokens: int
    dtype: str
    products: str = "torch"  # of the prompt, see Decoder

    def __post_init__(self) -> None:
        find_config(self.config)
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {self.dtype!r}")
        for name, least in (("batch", 1), ("prompt", 1), ("new_tokens", 2)):
            if getattr(self, name) < least:
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} must be at least {least}; got {getattr(self, name)}")

    def __str__(self) -> str:
        products = "" if self.products == "torch" else f" with products on {self.products}"
        return f"{self.config}, batch {self.batch}, prompt {self.prompt:,}, {self.dtype}{products}"

    @property
    def length(self) -> int:
        """Positions of a sequence: room for the new tokens, and for the steps that are looked at."""
        return self.prompt + max(self.new_tokens, STEPS + 2)

    @property
    def middle(self) -> float:
        """How many positions are read on average by a step."""
        return self.prompt + self.new_tokens / 2

    def expect_room(self, device: torch.device, group: Group) -> Config:
        """The share of each of the processes, if the device has room for it: weights, cache and a prompt's activations.

        Raises:
            ValueError: the number of processes does not divide the model.
            NotEnoughMemory: it does not fit; what is needed, and what is free.
        """
        share = find_config(self.config).share(group.world)
        # x, its norm, the sum before, the result; q, k, v, or gate and up, and their product
        rows = self.batch * self.prompt
        activations = rows * 4 * share.hidden
        activations += max(rows * share.qkv_rows, min(rows, ROWS) * 3 * share.inner)
        elements = share.weights + share.cache(self.batch, self.length) + activations
        dtype = DTYPES[self.dtype]
        if self.products == "tensor cores" and can_split(dtype, device):  # the weights' parts
            inside = share.heads * share.head_dim
            elements += share.layers * share.hidden * (share.qkv_rows + inside + 3 * share.inner)
        what = f"weights, cache and activations of {self}"
        if device.type == "cpu" and group.world > 1:  # the processes share its memory
            here = processes_here()
            elements, what = here * elements, f"{what}, of {here} processes,"
        expect_room(what, elements, dtype, device)
        return share


@dataclass
class Found:
    """What was measured for a case.

    Args:
        case: what was generated.
        world: processes that shared the model.
        read: bytes that a step has to read: weights, and keys and values at the middle of the new tokens.
        held: bytes of weights and cache.
        allocated, reserved: the decoder's peak of PyTorch's GPU memory, prompt included; 0 on a CPU. What was allocated
            before is not in it, but what was reserved is: the decoder may use it again.
        clock: of the SMs while it generates, in MHz, where it is known.
        begins: the first tokens of the first sequence.
        parts: of a step.
        one_launch: parts of a step in one launch.
        speeds: of each side.
        same: how many tokens of all sequences are the decoder's, before one differs.
        left_out: why a side is missing.
    """

    case: Case
    world: int
    read: float
    held: int
    allocated: int = 0
    reserved: int = 0
    clock: int | None = None
    begins: list[int] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    one_launch: list[Part] = field(default_factory=list)
    speeds: dict[str, Speed] = field(default_factory=dict)
    same: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def ours(self) -> Speed:
        """The decoder's."""
        return self.speeds[OURS]

    def floor(self, read_gb_per_s: float) -> float:
        """Milliseconds in which a pure read of a step's bytes is done."""
        return self.read / read_gb_per_s / 1e6


def prepare(
    case: Case,
    device: torch.device,
    seed: int,
    group: Group,
    *,
    persistent: bool | None = False,
) -> tuple[Decoder, Tensor]:
    """A decoder with random weights and a random prompt, int64 ``(batch, prompt)``, the same in all processes.

    Args:
        case: what is generated.
        device: where.
        seed: of weights and prompt.
        group: the processes that share the model.
        persistent: :class:`Decoder`'s. "The decoder" of the tables is the one whose step is a graph of launches.

    Raises:
        ValueError: the number of processes does not divide the model.
        NotEnoughMemory: it does not fit on the device; nothing was allocated.
    """
    config = find_config(case.config)
    case.expect_room(device, group)
    torch.manual_seed(seed)
    weights = Weights.random(config, device=device, dtype=DTYPES[case.dtype], group=group)
    decoder = Decoder(
        weights, case.batch, case.length, group=group, persistent=persistent, products=case.products
    )
    return decoder, torch.randint(config.vocab, (case.batch, case.prompt), device=device)


def run(
    case: Case,
    *,
    device: torch.device | None = None,
    peers: Mapping[str, Make] | None = None,
    profile: bool = False,
    seed: int = 0,
    group: Group | None = None,
) -> Found:
    """Measure a case.

    Args:
        case: what is generated.
        device: where; the current GPU if None.
        peers: what the decoder is compared with, for a single process. One that fails is left out.
        profile: whether to find the parts of a step.
        seed: of weights and prompt.
        group: the processes that share the model; each calls this. None: this one alone.

    Raises:
        ValueError, NotEnoughMemory: as :func:`prepare`.
    """
    device, group = device or device_of("cuda"), group or Group()
    cuda = device.type == "cuda"
    before = 0
    if cuda:
        gc.collect()  # of the case before
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    decoder, prompt = prepare(case, device, seed, group)
    tokens = generate(decoder, prompt, case.new_tokens)
    c, size = decoder.config, DTYPES[case.dtype].itemsize
    held = size * (decoder.weights.count + c.cache(case.batch, decoder.max_seq_len))
    found = Found(case, group.world, step_bytes(decoder, case.middle), held)
    if cuda:
        found.clock = _clock()  # the steps are queued, and still run
        torch.cuda.synchronize()
        found.allocated = torch.cuda.max_memory_allocated() - before
        found.reserved = torch.cuda.max_memory_reserved() - before
    found.begins = tokens[0, :12].tolist()
    sides = {OURS: decoder}
    for name, make in (peers or {}).items():
        try:
            side = make(decoder.weights, case.batch, case.length)
            found.same[name] = same_tokens(tokens, generate(side, prompt, case.new_tokens))
        except Exception as error:  # libraries raise all kinds of errors for what they do not take
            out_of_memory = isinstance(error, torch.cuda.OutOfMemoryError)
            found.left_out[name] = "out of memory" if out_of_memory else reason_of(error)
        else:
            sides[name] = side
    found.speeds = measure(sides, prompt, case.new_tokens)
    if profile:
        found.parts = breakdown(decoder, prompt)
        if ONE_LAUNCH in sides:
            step_us = 1e3 * found.speeds[ONE_LAUNCH].between.median_ms
            found.one_launch = phases(sides[ONE_LAUNCH], prompt, step_us)
    return found


def _clock() -> int | None:
    try:
        return torch.cuda.clock_rate()
    except Exception:  # nvidia-ml-py is not installed
        return None
