"""GPT-2 by a loop of our own: the prompts at once, then one CUDA graph for each step.

``model.generate`` of transformers spends most of a step on the host: it calls some 150 kernels from Python, and builds
masks and caches. Here lengths, tokens and the cache stay on the device, in buffers that stay where they are.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GPT2LMHeadModel

from task4.prefill import fast_attention
from task5.ladder import append_rope, decode_attention
from task6.generation.graph import capture


class Gpt2Decoder:
    """Greedy decoding of some prompts, which may have different lengths.

    Args:
        model: a GPT-2 of transformers, in evaluation; its weights are shared.
        batch: prompts.
        max_seq_len: positions of each, prompt and new tokens together; at most the model's.

    Attributes:
        tokens: int64 ``(batch,)``, the newest token of each sequence.
        lengths: int32 ``(batch,)``, how many positions of the cache are filled.
        logits: ``(batch, vocab)``, from which the newest tokens were taken.

    Raises:
        ValueError: sizes that do not fit the model, or a model whose heads are not 64, 128 or 256 wide.
    """

    def __init__(self, model: GPT2LMHeadModel, batch: int, max_seq_len: int) -> None:
        c, w = model.config, model.transformer.wte.weight
        if batch < 1 or not 2 <= max_seq_len <= c.n_positions:
            raise ValueError(
                f"batch must be at least 1, and max_seq_len from 2 to {c.n_positions}; got {batch} and {max_seq_len}"
            )
        head_dim = c.n_embd // c.n_head
        if head_dim not in (64, 128, 256):
            raise ValueError(f"head_dim must be 64, 128 or 256; got {head_dim}")
        if (
            c.activation_function != "gelu_new"
            or not c.scale_attn_weights
            or c.scale_attn_by_inverse_layer_idx
        ):
            raise ValueError("the model must have GPT-2's own activation and scaling of scores")
        self.model, self.batch, self.max_seq_len = model, batch, max_seq_len
        self.heads, self.head_dim = c.n_head, head_dim
        place = dict(device=w.device, dtype=w.dtype)
        self.cache = torch.empty(c.n_layer, 2, batch, max_seq_len, c.n_head, head_dim, **place)
        self.tokens = torch.zeros(batch, dtype=torch.int64, device=w.device)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=w.device)
        self.logits = torch.empty(batch, c.vocab_size, **place)
        self.filled = 0  # the largest of lengths, known to the host
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, end: int | None = None
    ) -> list[list[int]]:
        """The new token ids of each prompt.

        Args:
            prompts: token ids, as many prompts as the batch.
            max_new_tokens: at most so many.
            end: the id that ends a text, which is the last of its ids then; None: nothing does.

        Raises:
            ValueError: prompts that do not fit, ids that are not in the vocabulary, or no room for the new tokens.
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
        self._prefill(prompts)
        columns = [self.tokens.clone()]
        ended = self.tokens == end
        for i in range(1, max_new_tokens):
            if end is not None and i % 16 == 0 and bool(ended.all()):  # each look waits for the GPU
                break
            columns.append(self._next().clone())
            ended |= self.tokens == end
        rows = torch.stack(columns, 1).tolist()
        return [row[: row.index(end) + 1] if end in row else row for row in rows]

    def _prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        """Padded on the right: no token sees what comes behind it, and each step overwrites a position of padding."""
        device, longest = self.tokens.device, max(map(len, prompts))
        rows = torch.tensor([[*p, *[0] * (longest - len(p))] for p in prompts], device=device)
        low, high = (int(n) for n in rows.aminmax())
        if low < 0 or high >= self.logits.shape[1]:
            raise ValueError(
                f"token ids must be from 0 to {self.logits.shape[1] - 1}; got {low} to {high}"
            )
        self.lengths.fill_(longest)
        hidden = self._layers(rows, torch.arange(longest, device=device))
        last = torch.tensor([len(p) - 1 for p in prompts], device=device)
        self.lengths.copy_(last + 1)
        self.filled = longest
        self._choose(hidden[torch.arange(self.batch, device=device), last])

    def _next(self) -> Tensor:
        if self.tokens.is_cuda and self._graph is None:
            self._graph = capture(self._step, self.tokens, self.lengths)
        if self._graph is None:
            self._step()
        else:
            self._graph.replay()
        self.filled += 1
        return self.tokens

    def _step(self) -> None:
        self.lengths += 1
        self._choose(self._layers(self.tokens[:, None], (self.lengths - 1)[:, None])[:, 0])

    def _choose(self, hidden: Tensor) -> None:
        torch.mm(hidden, self.model.lm_head.weight.T, out=self.logits)
        torch.argmax(self.logits, dim=-1, out=self.tokens)

    def _layers(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """``(batch, seq)`` tokens to ``(batch, seq, hidden)``, normed; their keys and values go to the cache."""
        t, seq = self.model.transformer, tokens.shape[1]
        x = F.embedding(tokens, t.wte.weight) + F.embedding(positions, t.wpe.weight)
        for block, (k_cache, v_cache) in zip(t.h, self.cache, strict=True):
            qkv = block.attn.c_attn(block.ln_1(x)).unflatten(-1, (3, self.heads, self.head_dim))
            q, k, v = qkv.unbind(2)
            append_rope(q, k, v, k_cache, v_cache, seqlens_k=self.lengths)
            if seq == 1:
                o = decode_attention(q, k_cache, v_cache, seqlens_k=self.lengths)
            else:
                o = fast_attention(q, k, v, causal=True)
            x = x + block.attn.c_proj(o.flatten(2))
            x = x + block.mlp.c_proj(F.gelu(block.mlp.c_fc(block.ln_2(x)), approximate="tanh"))
        return t.ln_f(x)
