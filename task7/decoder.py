"""GPT-2 by a loop of our own: the prompts at once, then one CUDA graph for each step.

``model.generate`` of transformers spends most of a step on the host: it calls some 150 kernels from Python, and builds
masks and caches. Here lengths, tokens and the cache stay on the device, in buffers that stay where they are. For up
to 8 prompts on a Hopper GPU, the whole step is one kernel.

    Gpt2Decoder    the prompts, a step, greedy decoding
    Gpt2Loop       its steps in transformers' ``generate``: padding, sampling, streaming, the end of a text
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel, LogitsProcessorList
from transformers.generation import (
    BaseStreamer,
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    MaxLengthCriteria,
    StoppingCriteriaList,
)
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from task4.prefill import fast_attention
from task5.ladder import append_rope, decode_attention
from task6.generation.config import HEAD_DIMS, WIDTH
from task6.generation.graph import GraphedStep
from task6.generation.persistent import PersistentStep, StepModel, by_default
from task6.generation.product import MAX_ROWS, product
from task6.generation.weights import expect_room
from task7.streaming import expect_finite, expect_steps

# What a config may change, and the loop's kernels do not have.
EXPECTED = {
    "activation_function": "gelu_new",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
}


class Gpt2Decoder:
    """Greedy decoding of some prompts, which may have different lengths.

    Args:
        model: a GPT-2 of transformers, in evaluation; its weights are shared.
        batch: prompts.
        max_seq_len: positions of each, prompt and new tokens together; at most the model's.
        fused: whether a step's products are :func:`task6.generation.product.product`, for batches up to 16; None: on a
            GPU. They read rows of weights, and GPT-2's are stored as columns: the layers' are copied once.
        persistent: whether a step is one launch, :class:`task6.generation.persistent.PersistentStep`, with these
            copies: on a Hopper GPU, for up to 8 prompts. None: where that is so and the kernel takes the model, unless
            ``fused`` is given; otherwise a step is a graph of launches.

    Attributes:
        tokens: int64 ``(batch,)``, the newest token of each sequence.
        lengths: int32 ``(batch,)``, how many positions of the cache are filled.
        logits: ``(batch, vocab)``, from which the newest tokens were taken.
        one_launch: the persistent step, or None.

    Raises:
        ValueError: sizes that do not fit the model, what :func:`check_model` refuses, or with ``persistent=True`` what
            such a step does not take.
        NotEnoughMemory: the cache, or the copies of the weights, do not fit on the device; nothing was allocated.
    """

    def __init__(
        self,
        model: GPT2LMHeadModel,
        batch: int,
        max_seq_len: int,
        *,
        fused: bool | None = None,
        persistent: bool | None = None,
    ) -> None:
        c, w = model.config, model.transformer.wte.weight
        if batch < 1 or not 2 <= max_seq_len <= c.n_positions:
            raise ValueError(
                f"batch must be at least 1, and max_seq_len from 2 to {c.n_positions}; got {batch} and {max_seq_len}"
            )
        check_model(c)
        open_to_both = persistent is None and fused is None
        fused = persistent or ((w.is_cuda if fused is None else fused) and batch <= MAX_ROWS)
        what, elements = "the keys and values", 2 * c.n_layer * batch * max_seq_len * c.n_embd
        if fused:
            what += " and the layers' weights as rows"
            elements += sum(p.numel() for p in model.transformer.h.parameters())
        expect_room(what, elements, w.dtype, w.device)
        self.model, self.batch, self.max_seq_len = model, batch, max_seq_len
        self.heads, self.head_dim = c.n_head, c.n_embd // c.n_head
        place = dict(device=w.device, dtype=w.dtype)
        shape = (c.n_layer, 2, batch, max_seq_len, c.n_head, self.head_dim)
        self.cache = torch.empty(shape, **place)
        self.tokens = torch.zeros(batch, dtype=torch.int64, device=w.device)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=w.device)
        self.logits = torch.empty(batch, c.vocab_size, **place)
        self.filled = 0  # the largest of lengths, known to the host
        self._blocks = [_Block.of(block) for block in model.transformer.h] if fused else None
        head = model.lm_head.weight  # wte's, unless the model's config says otherwise
        self._head = _Linear.of(head, None, model.transformer.ln_f) if fused else None
        self.one_launch: PersistentStep | None = None
        if persistent or (open_to_both and fused):
            step_model = self._step_model()
            if persistent or by_default(step_model, self.lengths):
                self.one_launch = PersistentStep(step_model, self.tokens, self.lengths, self.logits)
        self._advance = GraphedStep(self.tokens, self.lengths, max_seq_len)

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, end: int | None = None
    ) -> list[list[int]]:
        """The new token ids of each prompt, by greedy decoding.

        Args:
            prompts: token ids, as many prompts as the batch.
            max_new_tokens: at most so many.
            end: the id that ends a text, which is the last of its ids then; None: nothing does.

        Raises:
            ValueError: prompts that do not fit, ids that are not in the vocabulary, or no room for the new tokens.
        """
        columns: list[Tensor] = []
        ended = torch.zeros_like(self.tokens, dtype=torch.bool)
        for i, tokens in enumerate(self.steps(prompts, max_new_tokens)):
            columns.append(tokens.clone())
            ended |= tokens == end
            if (
                end is not None and i % 16 == 15 and bool(ended.all())
            ):  # each look waits for the GPU
                break
        rows = torch.stack(columns, 1).tolist()
        return [row[: row.index(end) + 1] if end in row else row for row in rows]

    def steps(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        choose: Callable[[Tensor], Tensor] | None = None,
        seen: list[list[Tensor]] | None = None,
    ) -> Iterator[Tensor]:
        """``self.tokens`` after the prompts and after each further step, ``max_new_tokens`` times.

        Args:
            prompts, max_new_tokens: as for :meth:`generate`.
            choose: takes the logits to the next tokens, int64 ``(batch,)``; None: the likeliest, in the step's graph.
            seen: gets the hidden states of the prompts and of each step, as :meth:`look_ahead` returns them.

        Raises:
            ValueError: as :meth:`generate`, before anything runs.
        """
        longest = max((len(p) for p in prompts), default=0)
        if len(prompts) != self.batch or min(map(len, prompts), default=0) < 1:
            raise ValueError(
                f"{self.batch} prompts of at least one token are needed; got lengths {[len(p) for p in prompts]}"
            )
        if not 1 <= max_new_tokens <= self.max_seq_len - longest + 1:
            raise ValueError(
                f"{self.max_seq_len} positions are too few for {longest} tokens and {max_new_tokens} new ones"
            )
        low, high = min(map(min, prompts)), max(map(max, prompts))
        if low < 0 or high >= self.logits.shape[1]:
            raise ValueError(
                f"token ids must be from 0 to {self.logits.shape[1] - 1}; got {low} to {high}"
            )
        return self._steps(prompts, max_new_tokens, choose, seen)

    def _steps(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        choose: Callable[[Tensor], Tensor] | None,
        seen: list[list[Tensor]] | None,
    ) -> Iterator[Tensor]:
        for i in range(max_new_tokens):
            if seen is not None:
                seen.append(self.look_ahead() if i else [])
            tokens = self.step() if i else self.prefill(prompts, seen and seen[0])
            yield tokens if choose is None else tokens.copy_(choose(self.logits))

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]], seen: list[Tensor] | None = None) -> Tensor:
        """Begin anew with these prompts, which :meth:`steps` has checked: ``self.tokens``, the first new ones.

        They are padded on the right: no token sees what comes behind it, and each step overwrites a position of
        padding. ``seen`` gets the hidden states, as in :meth:`look_ahead`.
        """
        device, longest = self.tokens.device, max(map(len, prompts))
        rows = torch.tensor([[*p, *[0] * (longest - len(p))] for p in prompts], device=device)
        self.lengths.fill_(longest)
        hidden = self._layers(rows, torch.arange(longest, device=device), seen)
        last = torch.tensor([len(p) - 1 for p in prompts], device=device)
        self.lengths.copy_(last + 1)
        self.filled = longest
        self._choose(hidden[torch.arange(self.batch, device=device), last])
        return self.tokens

    @torch.inference_mode()
    def step(self) -> Tensor:
        """Append the newest token of each sequence: ``self.tokens``, the next ones.

        On a GPU the first step is captured as a CUDA graph, and later ones replay it.

        Raises:
            ValueError: no prompt yet, or no position left: a graph would write past its buffers.
        """
        self._advance(self._step, self.filled)
        self.filled += 1
        return self.tokens

    @torch.inference_mode()
    def look_ahead(self) -> list[Tensor]:
        """The hidden states of the step that comes next, each ``(batch, 1, hidden)``; nothing advances.

        They are those after the embeddings and after each layer, the last of them normed, as transformers counts them.
        A graph keeps none of them, so its kernels are launched here one by one.
        """
        before = self.tokens.clone(), self.lengths.clone()
        seen: list[Tensor] = []
        self._step(seen)
        self.tokens.copy_(before[0])
        self.lengths.copy_(before[1])
        return seen

    def _step(self, seen: list[Tensor] | None = None) -> None:
        if self.one_launch is not None and seen is None:
            return self.one_launch()
        self.lengths += 1
        if self._blocks is None:
            hidden = self._layers(self.tokens[:, None], (self.lengths - 1)[:, None], seen)
            self._choose(hidden[:, 0])
        else:
            self._few_rows(seen)
            torch.argmax(self.logits, dim=-1, out=self.tokens)

    def _choose(self, hidden: Tensor) -> None:
        torch.mm(hidden, self.model.lm_head.weight.T, out=self.logits)
        torch.argmax(self.logits, dim=-1, out=self.tokens)

    def _step_model(self) -> StepModel:
        t, head = self.model.transformer, self._head
        layers = [
            dict(
                **block.qkv.named("qkv"), **block.o.named("o"), **block.up.named("up"), **block.down.named("down"),
                norm_1=block.qkv.norm, norm_2=block.up.norm,
            )
            for block in self._blocks
        ]  # fmt: skip
        return StepModel(
            layers, self.cache[:, 0], self.cache[:, 1], t.wte.weight, head.norm, head.w, self.heads, "gelu",
            self.model.config.layer_norm_epsilon,
            head_sums=head.row_sums, head_bias=head.bias, positions=t.wpe.weight,
        )  # fmt: skip

    def _few_rows(self, seen: list[Tensor] | None) -> None:
        """A step: four products per layer, with norms, biases, GELU and residuals in them."""
        t, eps = self.model.transformer, self.model.config.layer_norm_epsilon
        x = F.embedding(self.tokens, t.wte.weight) + F.embedding(self.lengths - 1, t.wpe.weight)
        for block, (k_cache, v_cache) in zip(self._blocks, self.cache, strict=True):
            if seen is not None:
                seen.append(x[:, None].clone())
            qkv = product(x, eps=eps, **block.qkv._asdict()).view(self.batch, 1, 3, self.heads, -1)
            q, k, v = qkv.unbind(2)
            append_rope(q, k, v, k_cache, v_cache, seqlens_k=self.lengths)
            o = decode_attention(q, k_cache, v_cache, seqlens_k=self.lengths, new_keys=1)
            product(o.view(self.batch, -1), residual=x, out=x, **block.o._asdict())
            inner = product(x, eps=eps, activation="gelu", **block.up._asdict())
            product(inner, residual=x, out=x, **block.down._asdict())
        if seen is not None:
            seen.append(t.ln_f(x)[:, None])
        product(x, eps=eps, out=self.logits, **self._head._asdict())

    def _layers(self, tokens: Tensor, positions: Tensor, seen: list[Tensor] | None) -> Tensor:
        """``(batch, seq)`` tokens to ``(batch, seq, hidden)``, normed; their keys and values go to the cache."""
        t, seq = self.model.transformer, tokens.shape[1]
        x = F.embedding(tokens, t.wte.weight) + F.embedding(positions, t.wpe.weight)
        for block, (k_cache, v_cache) in zip(t.h, self.cache, strict=True):
            if seen is not None:
                seen.append(x)
            qkv = block.attn.c_attn(block.ln_1(x)).unflatten(-1, (3, self.heads, self.head_dim))
            q, k, v = qkv.unbind(2)
            append_rope(q, k, v, k_cache, v_cache, seqlens_k=self.lengths)
            if seq == 1:
                o = decode_attention(q, k_cache, v_cache, seqlens_k=self.lengths, new_keys=1)
            else:
                o = fast_attention(q, k, v, causal=True)
            x = x + block.attn.c_proj(o.flatten(2))
            x = x + block.mlp.c_proj(F.gelu(block.mlp.c_fc(block.ln_2(x)), approximate="tanh"))
        x = t.ln_f(x)
        if seen is not None:
            seen.append(x)
        return x


class _Linear(NamedTuple):
    """``norm(x) @ w.T + bias`` as :func:`product` takes it: what the norm adds is in the bias."""

    w: Tensor
    bias: Tensor | None
    norm: Tensor | None = None
    row_sums: Tensor | None = None

    @classmethod
    @torch.inference_mode()
    def of(cls, w: Tensor, bias: Tensor | None, norm: nn.LayerNorm | None) -> "_Linear":
        if norm is None:
            return cls(w, bias)
        added = w @ norm.bias
        return cls(w, added if bias is None else added + bias, norm.weight, w @ norm.weight)

    def named(self, name: str) -> dict[str, Tensor | None]:
        """As a layer of :class:`StepModel` has it."""
        return {name: self.w, f"{name}_sums": self.row_sums, f"{name}_bias": self.bias}


class _Block(NamedTuple):
    """A layer's products, whose weights are copied: GPT-2's are stored as columns."""

    qkv: _Linear
    o: _Linear
    up: _Linear
    down: _Linear

    @classmethod
    def of(cls, block: GPT2Block) -> "_Block":
        attn, mlp = block.attn, block.mlp
        given = (
            (attn.c_attn, block.ln_1), (attn.c_proj, None), (mlp.c_fc, block.ln_2), (mlp.c_proj, None)
        )  # fmt: skip
        return cls(
            *(_Linear.of(conv.weight.T.contiguous(), conv.bias, norm) for conv, norm in given)
        )


def check_model(config: GPT2Config) -> None:
    """ValueError for a GPT-2 that the loop cannot run: of other sizes, activation or scaling of scores."""
    if config.n_layer < 1:
        raise ValueError(f"n_layer must be at least 1; got {config.n_layer}")
    head_dim = config.n_embd // config.n_head
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim must be one of {HEAD_DIMS}; got {head_dim}")
    inner = 4 * config.n_embd if config.n_inner is None else config.n_inner
    if inner < 1 or inner % WIDTH:
        raise ValueError(f"n_inner must be a positive multiple of {WIDTH}; got {inner}")
    for name, own in EXPECTED.items():
        if (value := getattr(config, name)) != own:
            raise ValueError(f"{name} must be {own!r}, GPT-2's own; got {value!r}")


class Gpt2Loop:
    """The steps of a :class:`Gpt2Decoder` inside transformers' ``generate``, in place of its own.

    transformers reads the options, those of the folder's generation_config.json too, and its own classes shape the
    scores. One random number is drawn per step and sequence, as there: with one seed both sample the same tokens,
    unless rounding of the logits changes a draw.

    Args:
        model: as for :class:`Gpt2Decoder`.
        max_seq_len: positions of a sequence, for which the graph is captured.

    Raises:
        ValueError: a model that :func:`check_model` refuses.
    """

    def __init__(self, model: GPT2LMHeadModel, max_seq_len: int) -> None:
        check_model(model.config)
        self.model, self.max_seq_len = model, max_seq_len
        self._decoder: Gpt2Decoder | None = None

    @torch.inference_mode()
    def generate(
        self,
        tokens: Tensor,
        *,
        attention_mask: Tensor,
        streamer: BaseStreamer | None = None,
        **options: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """``tokens`` and the new ones, int64 ``(batch, seq + new)``; a sequence that is over goes on with padding.

        Args:
            tokens, attention_mask: int64 ``(batch, seq)``, padded on the left.
            streamer: gets the prompts, then the tokens of each step, on the CPU.
            options: transformers', ``max_new_tokens`` and ``pad_token_id`` among them. What it takes for its caches
                changes nothing here. ``return_dict_in_generate``: with the logits and hidden states of each step; all
                prompts have one length then. Tokens and logits are the graph's; hidden states are of the same step, its
                kernels launched one by one.

        Raises:
            ValueError: as :meth:`Gpt2Decoder.generate`, transformers and :func:`task7.streaming.expect_steps`, before
                anything runs; a trace of padded prompts; NotFinite at the end of a text whose last logits are not
                finite, unless it is traced.
            NotEnoughMemory: the cache does not fit on the device.
        """
        decode = partial(self._decode, mask=attention_mask, out=streamer)
        options["cache_implementation"] = None  # a static one would take memory
        return self.model.generate(
            tokens, attention_mask=attention_mask, custom_generate=decode, **options
        )

    def _decode(
        self,
        model: GPT2LMHeadModel,
        tokens: Tensor,
        *,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        mask: Tensor,
        out: BaseStreamer | None,
        **_: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """What ``generate`` of transformers calls with all that it prepared."""
        expect_steps(generation_config)
        trace, sample = generation_config.return_dict_in_generate, generation_config.do_sample
        if trace and not mask.all():
            raise ValueError("hidden states are recorded for prompts of one length; got padding")
        ends, padding = _ends(generation_config), generation_config.pad_token_id
        # What else may end a text: its time.
        criteria = [
            c for c in stopping_criteria if not isinstance(c, (EosTokenCriteria, MaxLengthCriteria))
        ]
        new: list[list[int]] = []
        logits: list[Tensor] = []
        seen: list[list[Tensor]] | None = [] if trace else None
        text = tokens

        def choose(logits: Tensor) -> Tensor:
            nonlocal text
            scores = logits_processor(text, logits.to(torch.float32, copy=True))
            try:
                chosen = (
                    torch.multinomial(scores.softmax(-1), 1) if sample else scores.argmax(-1, True)
                )
            except RuntimeError:  # nothing can be drawn from NaN
                expect_finite(logits, model.dtype)
                raise
            text = torch.cat((text, chosen), 1)
            return chosen[:, 0]

        decoder = self._decoder_for(len(tokens))
        steps = decoder.steps(
            [row[keep].tolist() for row, keep in zip(tokens, mask.bool(), strict=True)],
            generation_config.max_new_tokens,
            choose=choose if sample or logits_processor else None,
            seen=seen,
        )
        if out is not None:
            out.put(tokens.cpu())
        over = [False] * len(tokens)
        for newest in steps:
            if trace:
                logits.append(decoder.logits.to(torch.float32, copy=True))
            chosen = newest.tolist()  # waits for the step; the rest needs no GPU
            new.append([padding if o else id for o, id in zip(over, chosen, strict=True)])
            if out is not None:
                out.put(torch.tensor(new[-1]))
            over = [o or id in ends for o, id in zip(over, chosen, strict=True)]
            if all(over) or any(c(tokens, None).any() for c in criteria):
                break
        sequences = torch.cat((tokens, torch.tensor(new, device=tokens.device).T), 1)
        if not trace:
            expect_finite(decoder.logits, model.dtype)
            return sequences
        return GenerateDecoderOnlyOutput(
            sequences=sequences, logits=tuple(logits), hidden_states=tuple(map(tuple, seen))
        )

    def _decoder_for(self, batch: int) -> Gpt2Decoder:
        """The last one, whose graph is captured, if its batch is this one."""
        if self._decoder is None or self._decoder.batch != batch:
            self._decoder = None  # its memory is needed for the next
            self._decoder = Gpt2Decoder(self.model, batch, self.max_seq_len)
        return self._decoder


def _ends(config: GenerationConfig) -> list[int]:
    """The ids that end a text."""
    ends = config.eos_token_id
    return ends if isinstance(ends, list) else [] if ends is None else [ends]
