"""Times a decoder: ``python -m task6.generation``. See README.md beside this file."""

import argparse
import sys
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table

from common.build import BuildError
from common.check.case import device_of
from common.memory import NotEnoughMemory, gib
from common.timing.reference import reference
from task6.generation.config import CONFIGS, find_config
from task6.generation.decoder import Decoder
from task6.generation.measure import PROFILED, measure, profile_steps
from task6.generation.parallel import Group, LostProcess, processes
from task6.generation.weights import Weights

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ROWS = 15  # of a profile

console = Console(
    width=None if sys.stdout.isatty() else 120, highlight=False, emoji=False, markup=False
)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 0 if it ran."""
    options = _parse(argv)
    try:
        return _run(options)
    except (ValueError, NotEnoughMemory, BuildError, LostProcess) as error:
        console.print(f"task6.generation: {error}")
        return 1
    except KeyboardInterrupt:
        console.print("\ninterrupted")
        return 130


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m task6.generation",
        description="Time a model with random weights: the time to the first token, and between tokens.",
    )
    add, names = parser.add_argument, ", ".join(CONFIGS)
    cuda = torch.cuda.is_available()
    # fmt: off
    add("--config", default="course" if cuda else "tiny", metavar="NAME", help=f"{names}; default: %(default)s")
    add("--batch", type=int, default=4, metavar="N", help="sequences; default: %(default)s")
    add("--prompt", type=int, default=1024 if cuda else 64, metavar="N",
        help="tokens of each prompt; default: %(default)s")
    add("--new-tokens", type=int, default=100 if cuda else 20, metavar="N", help="default: %(default)s")
    add("--dtype", default="bfloat16" if cuda else "float32", choices=DTYPES,
        help="of weights and cache; default: %(default)s")
    add("--device", default="cuda" if cuda else "cpu", choices=("cpu", "cuda"), help="default: %(default)s")
    add("--profile", action="store_true", help="also where the time of a step goes, kernel by kernel")
    add("--seed", type=int, default=0, metavar="N", help="of the weights and the prompt; default: %(default)s")
    # fmt: on
    return parser.parse_args(argv)


def _run(options: argparse.Namespace) -> int:
    with processes(device_of(options.device)) as group:
        return _time(options, group)


def _time(options: argparse.Namespace, group: Group) -> int:
    config, device = find_config(options.config), device_of(options.device)
    for name in ("batch", "prompt", "new_tokens"):
        if getattr(options, name) < 1:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} must be at least 1; got {getattr(options, name)}")
    torch.manual_seed(options.seed)
    weights = Weights.random(config, device=device, dtype=DTYPES[options.dtype], group=group)
    length = options.prompt + options.new_tokens + PROFILED
    decoder = Decoder(weights, options.batch, length, group=group)
    prompt = torch.randint(config.vocab, (options.batch, options.prompt), device=device)
    speed = measure(decoder, prompt, options.new_tokens)
    found = profile_steps(decoder, prompt) if options.profile else []
    if group.rank > 0:
        return 0

    console.print(
        f"{options.config}: {config.layers} layers, hidden {config.hidden}, {config.heads}/{config.kv_heads} heads of"
        f" {config.head_dim}, vocabulary {config.vocab:,}; {config.weights:,} weights in {options.dtype}, random."
        f" Batch {options.batch}, prompt {options.prompt}, {options.new_tokens} new tokens."
        + f" Shared by {group.world} processes."
        * (group.world > 1)
    )
    console.print(f"It begins with {' '.join(map(str, speed.tokens[0, :12].tolist()))}.")
    rows = [
        ("time to first token", f"{speed.ttft:.4g} ms"),
        ("time between tokens, median", f"{speed.tbt:.4g} ms"),
        *((f"{p} % of them within", f"{speed.percentile(p):.4g} ms") for p in (90, 99)),
        ("tokens per second", f"{1e3 * options.batch / speed.tbt:,.4g}"),
        ("weights and cache, once per step", gib(speed.bytes)),
        ("read at", f"{speed.gb_per_s:,.4g} GB/s"),
    ]
    if device.type == "cuda":
        floor = speed.bytes / reference().read_gb_per_s / 1e6
        held = (
            config.weights + config.cache(options.batch, decoder.max_seq_len)
        ) * weights.embedding.element_size()
        rows += [
            ("the floor, at the bandwidth of a pure read", f"{floor:.4g} ms"),
            ("time between tokens, in units of it", f"{speed.tbt / floor:.3f}"),
            ("memory, relative to weights and cache", f"{speed.peak / held:.3f}"),
        ]
    _print(("", ""), rows)
    if options.profile:
        total = sum(took for _, _, took in found)
        what = "kernel" if device.type == "cuda" else "operator"
        shown = [
            (name[:70], f"{calls:g}", f"{1e3 * took:.1f}", f"{took / total:.1%}")
            for name, calls, took in found[:ROWS]
        ]
        if len(found) > ROWS:
            rest = sum(took for _, _, took in found[ROWS:])
            shown.append(
                (f"{len(found) - ROWS} others", "", f"{1e3 * rest:.1f}", f"{rest / total:.1%}")
            )
        _print((what, "calls per step", "us per step", "share"), shown)
        if device.type == "cpu":
            console.print("Our own kernels, which the CPU layer runs, are not among them.")
    return 0


def _print(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(box=None, pad_edge=False, show_header=any(header))
    for i, name in enumerate(header):
        table.add_column(name, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    console.print()
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
