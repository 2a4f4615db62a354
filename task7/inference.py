"""Write text with GPT-2 through the kernels of tasks 4 and 5: ``python -m task7.inference``.

``python -m task7.inference_ref`` does the same with Hugging Face's own attention.
"""

import argparse
import os
import sys
from collections.abc import Sequence

import torch
from rich.console import Console

from common.build import BuildError, KernelError
from common.memory import NotEnoughMemory
from task7.attention import NAME, kernel_calls
from task7.find import HUB_MODELS, TINY, TINY_FOLDER, find_model
from task7.model import PATHS, ModelWithCustomAttention, generate_options
from task7.streaming import Meter, print_texts, texts_of

__all__ = [
    "HUB_MODELS",
    "PROMPT",
    "TINY",
    "TINY_FOLDER",
    "ModelWithCustomAttention",
    "find_model",
    "run",
]

DTYPES = ("float32", "float16", "bfloat16")
# Of PATHS, in what --bisect prints.
_NAMES = {
    "generate": "our attention",
    # BEGIN STAFF
    "loop": "our loop",
    # END STAFF
    "reference": "Hugging Face",
}
PROMPT = (
    "What are the advantages of using flashattention kernels compared to the naive pytorch "
    "implementation? Think about the shared memory usage, the computation complexity, and the "
    "performance."
)


def run(arguments: Sequence[str] | None, attention: str, description: str) -> None:
    """The command line of inference and inference_ref."""
    ours = attention == NAME
    prog = "python -m task7.inference" if ours else "python -m task7.inference_ref"
    parser = _parser(prog, description)
    # BEGIN STAFF
    if ours:
        _add_paths(parser)
    # END STAFF
    args = parser.parse_args(arguments)
    if args.bisect and args.sample:
        parser.error("--bisect compares greedy decoding; leave --sample out")
    if args.bisect and args.path == args.against:
        parser.error(f"--path and --against are both {args.path}: there is nothing to compare")
    try:
        status = _bisect(args) if args.bisect else _write(args, args.path if ours else "reference")
        print(end="", flush=True)  # what cannot be written fails here
    except (ValueError, NotEnoughMemory, BuildError, KernelError, torch.OutOfMemoryError) as error:
        sys.exit(f"error: {error}")
    except NotImplementedError as error:
        sys.exit(f"error: task 7 runs on the kernels of tasks 4 and 5: {error}")
    except BrokenPipeError:  # head, for example, has read enough
        _drop_output()
        sys.exit(1)
    except OSError as error:
        _drop_output()
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
    if status:
        sys.exit(status)


def _drop_output() -> None:
    """Python writes what is left in its buffer at the end, and that would fail, too."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser(prog: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description=description)
    add = parser.add_argument
    add(
        "--model", default="gpt2", metavar="NAME",
        help=f"{', '.join(HUB_MODELS)}; {TINY}, the bundled model; or a folder with a GPT-2 in it (default: gpt2, and "
        f"{TINY} where it is not in the Hugging Face cache)",
    )  # fmt: skip
    add("--download", action="store_true", help="fetch the model if it is not in the cache")
    add("--device", help="cpu or cuda (default: the GPU if there is one)")
    add(
        "--dtype", choices=DTYPES, default="float32", help="of weights and activations (default: %(default)s)"
    )  # fmt: skip
    add(
        "--prompt", nargs="+", action="extend", metavar="TEXT",
        help="what the text begins with; several are continued together, as one batch, and where the output is not a "
        "terminal their texts come at the end; - reads them from standard input, one per line (default: a question "
        "about FlashAttention)",
    )  # fmt: skip
    add(
        "--max-new-tokens", type=int, default=200, metavar="N", help="for each prompt, at most (default: %(default)s)"
    )  # fmt: skip
    add(
        "--bisect", action="store_true",
        help="instead of the text: compare our attention with Hugging Face's, and name the first layer and token that "
        "differ; several prompts one by one, then as one batch; the exit status is 1 if rounding does not explain it",
    )  # fmt: skip
    parser.set_defaults(path="generate", against="reference")
    add = parser.add_argument_group("sampling").add_argument
    add("--sample", action="store_true", help="draw tokens at random (default: greedy decoding)")
    add("--seed", type=int, default=0, metavar="N", help="of the random numbers (default: %(default)s)")  # fmt: skip
    add(
        "--temperature", type=float, default=1.0, metavar="T",
        help="above 1 more random, below 1 less (default: %(default)s)",
    )  # fmt: skip
    add(
        "--top-k", type=int, default=50, metavar="K",
        help="draw from the K likeliest tokens; 0: from all (default: %(default)s)",
    )  # fmt: skip
    add(
        "--top-p", type=float, default=1.0, metavar="P",
        help="draw from the fewest likeliest tokens whose probabilities reach P (default: %(default)s, all)",
    )  # fmt: skip
    return parser


# BEGIN STAFF
def _add_paths(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("our own loop").add_argument
    add(
        "--path", choices=("generate", "loop"), default="generate",
        help="what continues the text: transformers' generate with our attention, or our own loop, on a GPU one CUDA "
        "graph per step. Greedy tokens are the same; with --sample both draw the same random numbers, so that they "
        "part only where rounding of a logit changes a draw (default: %(default)s)",
    )  # fmt: skip
    add(
        "--against", choices=tuple(PATHS), default="reference",
        help="what --bisect compares --path with; reference is transformers' generate with its own attention "
        "(default: %(default)s)",
    )  # fmt: skip


# END STAFF
def _load(args: argparse.Namespace, *paths: str) -> list[ModelWithCustomAttention]:
    """The model that the user asked for, once for each of these of PATHS."""
    folder, says = find_model(args.model, download=args.download)
    print(says, flush=True)
    dtype = getattr(torch, args.dtype)
    models = []
    for path in paths:
        models.append(ModelWithCustomAttention(folder, device=args.device, dtype=dtype))
        models[-1].use(path)
    return models


def _prompts(args: argparse.Namespace) -> list[str]:
    prompts: list[str] = []
    for prompt in args.prompt or [PROMPT]:
        if prompt != "-":
            prompts.append(prompt)
            continue
        lines = [line.rstrip("\n") for line in sys.stdin or () if line.strip()]
        if not lines:
            raise ValueError(
                "--prompt - expects one prompt per line of the standard input; it is "
                + ("closed" if sys.stdin is None else "empty")
            )
        prompts += lines
    return prompts


def _bisect(args: argparse.Namespace) -> int:
    from task7.bisection import bisect, bisect_batch, show, show_batch

    # greedy decoding needs none of these numbers; wrong ones are refused as without --bisect
    generate_options(
        args.max_new_tokens, args.temperature, args.top_k, args.top_p, False, args.seed, "dynamic"
    )
    prompts = _prompts(args)
    ours, reference = _load(args, args.path, args.against)
    ours.encode(prompts)  # all of them are checked before the first is compared
    names, console = (_NAMES[args.path], _NAMES[args.against]), Console()
    beyond_rounding = False
    for prompt in prompts:
        found = bisect(ours, reference, prompt, args.max_new_tokens)
        print()
        show(found, ours, console, names)
        beyond_rounding |= found.origin is not None or found.behind_layers
    if len(prompts) > 1 and not beyond_rounding:
        forks = bisect_batch(ours, reference, prompts, args.max_new_tokens)
        print()
        show_batch(forks, prompts, ours, console, names)
        beyond_rounding = bool(forks)
    return int(beyond_rounding)


def _write(args: argparse.Namespace, path: str) -> int:
    prompts = _prompts(args)
    (model,) = _load(args, path)
    tokens, mask = model.encode(prompts)
    steps = model.stream_tokens(
        tokens,
        mask,
        args.max_new_tokens,
        args.temperature,
        args.top_k,
        top_p=args.top_p,
        do_sample=args.sample,
        seed=args.seed,
    )
    # The first launch compiles and loads the kernels. It is in the main thread, where Ctrl-C can end even a kernel that
    # does not return.
    warm_up = min(2, args.max_new_tokens)
    model.generate_tokens(tokens, mask, warm_up)
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)  # before the clock starts
    before = kernel_calls.copy()
    meter = Meter(model.model.generation_config.eos_token_id)
    print_texts(prompts, texts_of(meter.watch(steps), len(prompts), model.decode))
    calls = kernel_calls - before
    print(f"{meter} (warm-up before: {warm_up} steps)")
    how = (
        f"attention {PATHS[path]}: our prefill kernel was called {calls['prefill']} times and our decode kernel "
        f"{calls['decode']} times"
    )
    # BEGIN STAFF
    if path == "loop":
        graph = "one CUDA graph per step" if model.device.type == "cuda" else "no CUDA graph"
        how = f"our own loop: {graph}"
    # END STAFF
    print(f"{model.device}, {args.dtype}, {how}")
    return 0


if __name__ == "__main__":
    run(None, NAME, "Write text with GPT-2 through our kernels.")
