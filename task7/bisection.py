"""Where GPT-2 on our kernels and GPT-2 on Hugging Face's attention part: at which layer and token, and by how much.

Both write the same prompt on, greedily. A third model, the same weights in float64, says how far each is from the
exact result: the difference of the two alone shows neither which of them is wrong nor what rounding explains.

The second of the two is the yardstick. It may be of our kernels as well: one way to run them against another.
"""

import copy
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import GPT2LMHeadModel

from task7.streaming import NotFinite, expect_finite

if TYPE_CHECKING:
    from task7.model import ModelWithCustomAttention

FACTOR = 8.0  # as the tests of the kernels: another order of the same sums can lose this many times as much


@dataclass(frozen=True)
class Fork:
    """The first token that the two models choose differently.

    ``ours`` and ``reference`` are the tokens. The gaps are logit[reference] - logit[ours] in our model, in the
    reference, and in float64: there the exact model prefers our token if the gap is negative.
    """

    position: int
    ours: int
    reference: int
    gap_ours: float
    gap_reference: float
    gap_float64: float


@dataclass(frozen=True)
class Layer:
    """Errors of the hidden state after one layer: |x - exact| / |exact| (Euclidean norms), the largest of a token.

    ``allowed``: what rounding explains, FACTOR times the largest that the reference has after this layer in the whole
    text, and one rounding more.
    """

    ours: float
    reference: float
    allowed: float


@dataclass(frozen=True)
class Origin:
    """Where our hidden states first exceed what rounding explains: after ``layer``, at the token ``position``.

    The forward pass that did it had the tokens ``first ... last``: the whole prompt, or one token.
    """

    layer: int
    position: int
    first: int
    last: int


@dataclass(frozen=True)
class BatchFork:
    """The first token of a prompt that the two models choose differently where it is one of a batch.

    ``prompt`` is its number in the batch, and ``position`` counts without padding. ``gap`` is how far apart the logits
    of the two tokens are in float64 where the prompt is alone, and ``explained`` what of it rounding explains.
    """

    prompt: int
    position: int
    ours: int
    reference: int
    gap: float
    explained: float


@dataclass(frozen=True)
class Bisection:
    """What :func:`bisect` found. Layers and positions count from 0, positions with the prompt.

    Attributes:
        tokens: prompt and new tokens that both chose.
        new: how many of them are new.
        logits: largest difference of the two models' logits over all steps.
        logits_off: largest error of our logits over all steps, from float64.
        logits_allowed: what rounding explains of it, as ``Layer.allowed``.
        fork: the first token that differs; None if all agree.
        origin: the first layer and token beyond rounding; None if rounding explains everything.
        layers: errors per layer, in the forward pass of ``origin``; over the whole text where there is none. The last
            layer's include the final layer norm.
    """

    tokens: list[int]
    new: int
    logits: float
    logits_off: float
    logits_allowed: float
    fork: Fork | None
    origin: Origin | None
    layers: list[Layer]

    @property
    def behind_layers(self) -> bool:
        """Whether rounding explains the layers, but not the logits or the choice of the first token that differs.

        Two logits that are off by what is allowed exchange places if they are at most twice as far apart.
        """
        gap = abs(self.fork.gap_float64) if self.fork else 0.0
        explained = self.logits_off <= self.logits_allowed and gap <= 2 * self.logits_allowed
        return self.origin is None and not explained  # NaN is not explained


@torch.no_grad()
def bisect(
    ours: "ModelWithCustomAttention",
    reference: "ModelWithCustomAttention",
    prompt: str,
    max_new_tokens: int = 50,
    *,
    cache: str = "dynamic",
) -> Bisection:
    """Compare two models of the same weights token by token and, against float64, layer by layer.

    Args:
        ours, reference: on one device and of one dtype; ``reference`` is the one that is right, mostly with an
            attention of Hugging Face's.
        prompt: one text.
        max_new_tokens, cache: as for ``generate``. The comparison ends at the first token that differs.

    Raises:
        ValueError: the models differ in their weights, the reference's logits are not finite, or what ``generate``
            refuses.
    """
    _check_same_weights(ours.model, reference.model)
    tokens, mask = ours.encode([prompt])
    mine = ours.trace(tokens, mask, max_new_tokens, cache=cache)
    theirs = reference.trace(tokens, mask, max_new_tokens, cache=cache)

    prompt_len = tokens.shape[1]
    chosen = list(
        zip(
            mine.sequences[0, prompt_len:].tolist(),
            theirs.sequences[0, prompt_len:].tolist(),
            strict=False,  # after different tokens the texts may end at different lengths
        )
    )
    same = next((i for i, (a, b) in enumerate(chosen) if a != b), len(chosen))
    # Up to the pass that chose the first differing token, both models had the same tokens as inputs.
    passes = min(same + 1, len(chosen))
    inputs = mine.sequences[:, : prompt_len + passes - 1]

    my_logits = torch.cat(mine.logits[:passes])
    their_logits = torch.cat(theirs.logits[:passes])
    expect_finite(their_logits, reference.model.dtype, "the reference")
    exact = _exact(reference)(inputs, output_hidden_states=True, logits_to_keep=passes)
    exact_logits = exact.logits[0]
    fork = None
    if same < len(chosen):
        a, b = chosen[same]
        gaps = (
            float(logits[b].double() - logits[a].double())
            for logits in (my_logits[-1], their_logits[-1], exact_logits[-1])
        )
        fork = Fork(prompt_len + same, a, b, *gaps)

    mine_off = _errors(mine.hidden_states[:passes], exact.hidden_states)
    theirs_off = _errors(theirs.hidden_states[:passes], exact.hidden_states)
    eps = torch.finfo(reference.model.dtype).eps
    allowed = FACTOR * theirs_off.amax(1) + eps
    origin = _origin(~(mine_off <= allowed[:, None]), prompt_len)  # NaN is beyond
    shown = slice(origin.first, origin.last + 1) if origin else slice(None)
    columns = (mine_off[:, shown].amax(1), theirs_off[:, shown].amax(1), allowed)
    return Bisection(
        tokens=mine.sequences[0, : prompt_len + same].tolist(),
        new=same,
        logits=(my_logits - their_logits).abs().max().item(),
        logits_off=(my_logits - exact_logits).abs().max().item(),
        logits_allowed=_explained(their_logits, exact_logits, eps),
        fork=fork,
        origin=origin,
        layers=[Layer(*row) for row in zip(*(c.tolist() for c in columns), strict=True)],
    )


@torch.no_grad()
def bisect_batch(
    ours: "ModelWithCustomAttention",
    reference: "ModelWithCustomAttention",
    prompts: Sequence[str],
    max_new_tokens: int = 50,
) -> list[BatchFork]:
    """Compare the greedy tokens of two models of the same weights, where the prompts are one batch.

    For prompts of which :func:`bisect` finds nothing: a fault that needs padding on the left does not show in one
    prompt. What changes no token is not seen.

    Args:
        ours, reference, max_new_tokens: as for :func:`bisect`.
        prompts: the texts of the batch.

    Returns:
        One for each prompt whose tokens differ by more than rounding explains.

    Raises:
        ValueError: the reference's logits are not finite, or what ``generate`` refuses.
    """
    tokens, mask = ours.encode(prompts)
    mine: list[list[int]] = []
    with suppress(NotFinite):  # its tokens differ
        for step in ours.stream_tokens(tokens, mask, max_new_tokens):
            mine.append(step.tolist())
    theirs = reference.generate_tokens(tokens, mask, max_new_tokens).T[tokens.shape[1] :].tolist()
    eps, exact_model, forks = torch.finfo(reference.model.dtype).eps, None, []
    for row in range(len(prompts)):
        chosen = [(a[row], b[row]) for a, b in zip(mine, theirs, strict=False)]
        same = next((i for i, (a, b) in enumerate(chosen) if a != b), None)
        if same is None:
            continue
        a, b = chosen[same]
        text = tokens[row : row + 1, mask[row].bool()]
        text = torch.cat((text, text.new_tensor([[a for a, _ in chosen[:same]]])), dim=1)
        if exact_model is None:
            exact_model = _exact(reference)
        logits, exact = (
            model(text, logits_to_keep=same + 1).logits[0]
            for model in (reference.model, exact_model)
        )
        gap, explained = abs(float(exact[-1, a] - exact[-1, b])), 2 * _explained(logits, exact, eps)
        if not gap <= explained:
            forks.append(BatchFork(row, text.shape[1], a, b, gap, explained))
    return forks


def _exact(model: "ModelWithCustomAttention") -> GPT2LMHeadModel:
    """The model in float64, with matrix products and a softmax."""
    exact = copy.deepcopy(model.model).double()
    exact.set_attn_implementation("eager")
    for block in exact.transformer.h:
        block.attn.reorder_and_upcast_attn = False  # that is to float32
    return exact


def _check_same_weights(ours: torch.nn.Module, reference: torch.nn.Module) -> None:
    mine, theirs = ours.state_dict(), reference.state_dict()
    if mine.keys() != theirs.keys():
        raise ValueError("the two models must have the same layers")
    for name, weight in mine.items():
        other = theirs[name]
        if (weight.dtype, weight.device) != (other.dtype, other.device):
            raise ValueError(
                f"the two models must have one dtype and device; {name} is {weight.dtype} on {weight.device} "
                f"and {other.dtype} on {other.device}"
            )
        if weight.shape != other.shape or not torch.allclose(
            weight, other, rtol=0, atol=0, equal_nan=True
        ):
            raise ValueError(f"the two models must have the same weights; {name} differs")


def _errors(passes: Sequence[Sequence[Tensor]], exact: Sequence[Tensor]) -> Tensor:
    """Relative error after each layer at each token, float64 (layers, tokens).

    Args:
        passes: for each forward pass its hidden states, (1, its tokens, hidden) after the embeddings and after each
            layer. The embeddings, which need no attention, are left out.
        exact: the same in float64, for all tokens at once.
    """
    layers = [torch.cat(states, dim=1)[0].double() for states in zip(*passes, strict=True)][1:]
    return torch.stack(
        [
            (x - truth[0]).norm(dim=-1) / truth[0].norm(dim=-1)
            for x, truth in zip(layers, exact[1:], strict=True)
        ]
    )


def _explained(logits: Tensor, exact: Tensor, eps: float) -> float:
    """What rounding explains of an error in a logit, as ``Layer.allowed``; ``logits`` are the reference's."""
    return float(FACTOR * (logits - exact).abs().max() + eps * exact.abs().max())


def _origin(beyond: Tensor, prompt_len: int) -> Origin | None:
    """The first forward pass with an error, in it the first layer, in that the first token.

    Within a pass a wrong layer makes all later ones wrong. In later passes it may show from the layer after it: the
    cached keys and values of that one are wrong.

    ``beyond`` is bool (layers, tokens).
    """
    if not beyond.any():
        return None
    token = int(beyond.any(0).nonzero()[0])
    first, last = (0, prompt_len - 1) if token < prompt_len else (token, token)
    in_pass = beyond[:, first : last + 1]
    layer = int(in_pass.any(1).nonzero()[0])
    return Origin(layer, first + int(in_pass[layer].nonzero()[0]), first, last)


def show(
    found: Bisection,
    model: "ModelWithCustomAttention",
    console: Console,
    names: tuple[str, str] = ("our attention", "Hugging Face"),
) -> None:
    """Print what :func:`bisect` found: sentences, and a table of the layers. ``names`` are those of the two models."""
    ours, theirs = names
    quoted = partial(_quoted, model)

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    prompt = len(found.tokens) - found.new
    say(
        f"{prompt} tokens of the prompt, then {found.new} alike (tokens and layers count from 0); "
        f"largest difference of logits {found.logits:.3g}"
    )
    if fork := found.fork:
        say(
            f"token {fork.position} is the first that differs: {quoted(fork.ours)} with {ours}, "
            f"{quoted(fork.reference)} with {theirs}\nlogit of the second - logit of the first: {fork.gap_ours:.3g} "
            f"with {ours}, {fork.gap_reference:.3g} with {theirs}, {fork.gap_float64:.3g} in float64"
        )
    else:
        say("all tokens agree")

    origin = found.origin
    if origin is None:
        where = "largest of all tokens"
        say(f"after every layer the hidden states of {ours} are as exact as rounding allows")
        if found.behind_layers:
            say(
                "the fault lies behind the layers, in the logits or the choice of a token: rounding explains an error "
                f"of {found.logits_allowed:.3g} in a logit; the largest with {ours} is {found.logits_off:.3g}"
            )
    else:
        where = f"token {origin.first}"
        if origin.last > origin.first:
            where = f"largest of the tokens {origin.first} to {origin.last}, one forward pass"
        token = quoted(found.tokens[origin.position])
        off = found.layers[origin.layer]
        say(
            f"layer {origin.layer} is the first with more than a rounding error, from token {origin.position} "
            f"({token}) on: with {ours} {off.ours:.3g} of its hidden state; rounding explains {off.allowed:.3g}"
        )
    table = Table("layer", ours, theirs, "rounding explains", "", box=None)
    for column in table.columns[:4]:
        column.justify = "right"
    for number, layer in enumerate(found.layers):
        mark = "first" if origin and number == origin.layer else ""
        table.add_row(
            str(number), *(f"{x:.2e}" for x in (layer.ours, layer.reference, layer.allowed)), mark
        )
    say(f"\nerror of the hidden state after each layer, relative to float64 ({where})")
    console.print(table)


def show_batch(
    forks: Sequence[BatchFork],
    prompts: Sequence[str],
    model: "ModelWithCustomAttention",
    console: Console,
    names: tuple[str, str] = ("our attention", "Hugging Face"),
) -> None:
    """Print what :func:`bisect_batch` found, a sentence for each prompt. ``names`` are those of the two models."""
    quoted = partial(_quoted, model)
    lines = [
        f"prompt {fork.prompt}, {_short(prompts[fork.prompt])}: only the batch differs, whose prompts are padded on "
        f"the left; token {fork.position} is the first: {quoted(fork.ours)} with {names[0]}, "
        f"{quoted(fork.reference)} with {names[1]}; their logits are {fork.gap:.3g} apart in float64, and rounding "
        f"explains {fork.explained:.3g}"
        for fork in forks
    ]
    for line in lines or ["as one batch the prompts have no token that differs beyond rounding"]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _quoted(model: "ModelWithCustomAttention", token: int) -> str:
    return f"{token} {model.tokenizer.decode([token])!r}"


def _short(prompt: str) -> str:
    return repr(prompt if len(prompt) <= 60 else f"{prompt[:57]}...")
