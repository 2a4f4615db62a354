"""Make the tiny GPT-2 in this folder: ``python -m task7.tiny_gpt2.train`` (about five minutes on two cores).

Corpus, tokenizer, model and training are all here and in corpus.py, with fixed seeds. Another
machine or thread count sums in another order, so its weights differ in the last digits and
its text may differ too. The files are written at the end; a run that is stopped changes nothing.
"""

import argparse
import json
import math
import os
import platform
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import transformers
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Tokenizer

from common.marked import replace
from task7.tiny_gpt2.corpus import documents, words

FOLDER = Path(__file__).parent
END_OF_TEXT = "<|endoftext|>"
END_ID = 0
MAX_FOLDER_BYTES = 5_000_000


@dataclass(frozen=True)
class Settings:
    """Everything that decides what comes out."""

    seed: int = 7
    documents: int = 14_000
    held_out: int = 200
    vocab_size: int = 1536
    n_positions: int = 1024
    n_embd: int = 192  # 3 heads of 64, GPT-2's head_dim
    n_layer: int = 4
    n_head: int = 3
    steps: int = 750
    matrix_rate: float = (
        0.02  # Muon, for the matrices of the layers: half the steps that AdamW needs
    )
    other_rate: float = 4e-3  # AdamW, for embeddings, norms and biases
    # Most steps see short rows, which are cheap. Half of those rows get positions from somewhere in
    # the middle, and every fourth step has rows of the full length, so that each of the n_positions
    # embeddings is trained and attention over the whole window as well.
    short_rows: int = 12
    short_length: int = 256
    long_rows: int = 2
    long_every: int = 4


def train_tokenizer(texts: list[str], settings: Settings) -> GPT2Tokenizer:
    """A byte-level BPE tokenizer as GPT-2's, with a smaller vocabulary."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        texts,
        vocab_size=settings.vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        show_progress=False,
    )
    return GPT2Tokenizer(
        tokenizer_object=bpe._tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        unk_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=settings.n_positions,
    )


@dataclass
class Stream:
    """Documents one after another, each closed by END_ID: tokens (total,), starts (documents,)."""

    tokens: Tensor
    starts: Tensor

    @classmethod
    def of(cls, texts: list[str], tokenizer: GPT2Tokenizer) -> "Stream":
        ids: list[int] = []
        starts = []
        for document in tokenizer(texts)["input_ids"]:
            starts.append(len(ids))
            ids += [*document, END_ID]
        return cls(torch.tensor(ids), torch.tensor(starts))

    def rows(self, count: int, length: int, generator: torch.Generator | None = None) -> Tensor:
        """(count, length) tokens, each row from the start of a document; the first ones, or random."""
        usable = self.starts[self.starts <= len(self.tokens) - length]
        if generator is None:
            # spread over the stream, so that rows do not overlap
            picked = usable[torch.linspace(0, len(usable) - 1, count).long()]
        else:
            picked = usable[torch.randint(len(usable), (count,), generator=generator)]
        return self.tokens[picked[:, None] + torch.arange(length)]


def batch_of(
    stream: Stream, step: int, settings: Settings, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Tokens and positions (rows, length) of one step; see Settings for which."""
    if step % settings.long_every == settings.long_every - 1:
        tokens = stream.rows(settings.long_rows, settings.n_positions, rng)
        return tokens, torch.arange(settings.n_positions).expand_as(tokens)
    tokens = stream.rows(settings.short_rows, settings.short_length, rng)
    last_offset = settings.n_positions - settings.short_length
    offsets = torch.randint(last_offset + 1, (settings.short_rows, 1), generator=rng)
    offsets[: settings.short_rows // 2] = 0  # a prompt starts at position 0
    return tokens, offsets + torch.arange(settings.short_length)


def train(settings: Settings) -> tuple[GPT2LMHeadModel, GPT2Tokenizer, dict]:
    """Train from nothing; returns model (float16), tokenizer and the figures for training.json."""
    transformers.logging.disable_progress_bar()
    began = time.perf_counter()
    torch.manual_seed(settings.seed)
    rng = torch.Generator().manual_seed(settings.seed)
    texts = documents(settings.documents + settings.held_out, settings.seed)
    seen, unseen = texts[: settings.documents], texts[settings.documents :]
    unseen = [text for text in unseen if text not in set(seen)]
    tokenizer = train_tokenizer(seen, settings)
    train_stream, held_out = Stream.of(seen, tokenizer), Stream.of(unseen, tokenizer)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=settings.n_positions,
        n_embd=settings.n_embd,
        n_layer=settings.n_layer,
        n_head=settings.n_head,
        bos_token_id=END_ID,
        eos_token_id=END_ID,
        pad_token_id=END_ID,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config)
    start_positions(model.transformer.wpe.weight)
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{len(seen)} documents, {len(train_stream.tokens):,} tokens, "
        f"vocabulary {len(tokenizer)}, {parameters:,} parameters",
        flush=True,
    )

    matrices = [p for p in model.transformer.h.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if all(p is not m for m in matrices)]
    optimizers = (
        torch.optim.Muon(matrices, lr=settings.matrix_rate, weight_decay=0.0),
        torch.optim.AdamW(others, lr=settings.other_rate, betas=(0.9, 0.95), weight_decay=0.01),
    )
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, partial(rate, settings)) for o in optimizers]
    tokens_seen = 0
    recent: list[float] = []
    model.train()
    for step in range(settings.steps):
        tokens, positions = batch_of(train_stream, step, settings, rng)
        loss = token_losses(model, tokens, positions).mean()
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        tokens_seen += tokens.numel()
        recent.append(loss.item())
        if len(recent) == 25 or step + 1 == settings.steps:
            mean, seconds = sum(recent) / len(recent), time.perf_counter() - began
            print(
                f"step {step + 1:4d} of {settings.steps}   loss {mean:.3f}   {seconds:4.0f} s",
                flush=True,
            )
            recent.clear()

    # The weights are stored in 16 bits, so the figures are of the rounded ones.
    model.half().float().eval()
    figures = {
        "settings": asdict(settings),
        "parameters": parameters,
        "training_tokens": len(train_stream.tokens),
        "tokens_seen_in_training": tokens_seen,
        "held_out_loss_by_position": loss_by_position(model, held_out, settings.n_positions),
        "seconds": round(time.perf_counter() - began),
        "machine": {
            "processor": platform.machine(),
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    return model.half(), tokenizer, figures


def rate(settings: Settings, step: int) -> float:
    """Factor of the learning rates: up over 20 steps, then down along a cosine."""
    return min(1.0, (step + 1) / 20) * (
        0.02 + 0.49 * (1 + math.cos(math.pi * step / settings.steps))
    )


@torch.no_grad()
def start_positions(embedding: Tensor) -> None:
    """Start the position embeddings (positions, width) as sines and cosines.

    They are trained like all else. But from a random start each position has to be learned for itself,
    and a short training never gets to "the word after the last time this name came up".
    """
    positions, width = embedding.shape
    std = embedding.std()
    frequency = 10_000.0 ** -(torch.arange(0, width, 2) / width)
    angle = torch.arange(positions)[:, None] * frequency
    embedding.copy_(torch.stack((angle.sin(), angle.cos()), -1).flatten(1) * std * 2**0.5)


def token_losses(model: GPT2LMHeadModel, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
    """Loss in nats of every token but the first of each row: (rows, length) to (rows, length - 1)."""
    nothing_masked = torch.ones_like(tokens)  # END_ID is also what a batch is padded with
    logits = model(
        tokens, attention_mask=nothing_masked, position_ids=positions, use_cache=False
    ).logits
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none"
    )


@torch.no_grad()
def loss_by_position(model: GPT2LMHeadModel, held_out: Stream, length: int) -> dict[str, float]:
    """Mean loss (nats per token) on documents that were not trained on, over quarters of the window."""
    losses = token_losses(model, held_out.rows(16, length)).mean(0)
    quarter = length // 4
    return {
        f"{first}-{first + quarter - 1}": round(losses[first : first + quarter].mean().item(), 3)
        for first in range(0, length, quarter)
    }


def save(model: GPT2LMHeadModel, tokenizer: GPT2Tokenizer, figures: dict, folder: Path) -> int:
    """Put the files into ``folder``, each by an atomic rename; returns the bytes of all of them.

    Raises:
        ValueError: they are larger than what the repository has room for; nothing is written.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as new:
        model.save_pretrained(new)
        tokenizer.save_pretrained(new)
        Path(new, "training.json").write_text(json.dumps(figures, indent=2) + "\n")
        size = sum(path.stat().st_size for path in Path(new).iterdir())
        if size > MAX_FOLDER_BYTES:
            raise ValueError(
                f"the files have {size:,} bytes; at most {MAX_FOLDER_BYTES:,} are wanted"
            )
        Path(new, "words.txt").write_text(words())
        if (folder / "README.md").is_file():
            text = with_figures((folder / "README.md").read_text(), figures, size)
            Path(new, "README.md").write_text(text)
        for path in sorted(Path(new).iterdir()):
            path.chmod(0o644)
            os.replace(path, folder / path.name)
    return size


def with_figures(readme: str, figures: dict, size: int) -> str:
    """The model card with this training's figures between its markers."""
    machine = figures["machine"]
    lines = [
        "| | |",
        "|---|---|",
        f"| parameters | {figures['parameters']:,} |",
        f"| files | {size:,} bytes |",
        f"| corpus | {figures['settings']['documents']:,} documents, {figures['training_tokens']:,} tokens |",
        f"| training | {figures['settings']['steps']} steps, {figures['tokens_seen_in_training']:,} tokens |",
        *(
            f"| held-out loss at positions {where} | {loss} nats per token |"
            for where, loss in figures["held_out_loss_by_position"].items()
        ),
        f"| time | {figures['seconds']} s, {machine['threads']} threads ({machine['processor']}), "
        f"torch {machine['torch']}, transformers {machine['transformers']} |",
    ]
    return replace(readme, "train", {"figures": lines}, file="README.md")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--output", type=Path, default=FOLDER, help="folder to write (default: this one)"
    )
    parser.add_argument("--steps", type=int, default=Settings.steps)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    model, tokenizer, figures = train(Settings(steps=args.steps))
    size = save(model, tokenizer, figures, args.output)
    print(f"held-out loss by position {figures['held_out_loss_by_position']}")
    print(f"wrote {size:,} bytes to {args.output}")


if __name__ == "__main__":
    main()
