"""Where GPT-2 on our kernels and GPT-2 on Hugging Face's attention part: at which layer and token, and by how much.

Both write the same prompt on, greedily. A third model, the same weights in float64, says how far each is from the
exact result: the difference of the two alone shows neither which of them is wrong nor what rounding explains.

The second of the two is the yardstick. It may be of our kernels as well: one way to run them against another.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

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
        ValueError: the models differ in their weights, or what ``generate`` refuses.
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

    # eager in float64: matrix products and a softmax
    exact_model = copy.deepcopy(reference.model).double()
    exact_model.set_attn_implementation("eager")
    exact = exact_model(inputs, output_hidden_states=True, logits_to_keep=passes)
    del exact_model

    my_logits = torch.cat(mine.logits[:passes])
    their_logits = torch.cat(theirs.logits[:passes])
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
        logits_allowed=(
            FACTOR * (their_logits - exact_logits).abs().max() + eps * exact_logits.abs().max()
        ).item(),
        fork=fork,
        origin=origin,
        layers=[Layer(*row) for row in zip(*(c.tolist() for c in columns), strict=True)],
    )


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
        if not torch.equal(weight, other):
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

    def quoted(token: int) -> str:
        return f"{token} {model.tokenizer.decode([token])!r}"

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
