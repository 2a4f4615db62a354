"""Generation, a token after the other: the prompt at once, then one CUDA graph for each step.

On a Hopper GPU that graph is a single kernel where persistent.cu takes the model, and else a kernel for each part.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from common.inputs import expect
from common.products import linear_of
from common.products.fp32 import can_split
from task4.prefill import fast_attention
from task5.ladder import append_rope, decode_attention
from task6.generation.elementwise import add_rms_norm, swiglu
from task6.generation.graph import GraphedStep
from task6.generation.parallel import Group
from task6.generation.persistent import PersistentStep, StepModel, by_default
from task6.generation.product import MAX_ROWS, product
from task6.generation.weights import Weights, expect_room
from task6.rope import RoPE

MATRICES = ("qkv", "o", "gate_up", "down")  # of a layer
ROWS = 2048  # of a prompt's MLP at a time: nothing else takes as much memory
ROWS_WITH_NORM = 8  # up to which a product in 16 bits is faster with the norm in it


class Decoder:
    """Greedy decoding of a batch with buffers that stay where they are, so that a step is one CUDA graph.

    Args:
        weights: of the model.
        batch: sequences.
        max_seq_len: positions of each, prompt and new tokens together.
        group: the processes that share the model; None: this one alone.
        fused: whether a step's products are :func:`task6.generation.product.product`, for batches up to 16; None: on a
            GPU. The CPU layer takes long for them.
        persistent: whether a step is one launch, :class:`task6.generation.persistent.PersistentStep`: on a Hopper GPU,
            for up to 8 sequences. None: where that is so and the kernel takes the model, unless ``fused`` is given;
            otherwise a step is a graph of launches.
        products: a prompt's: "torch", or "tensor cores" for float32 products as
            :class:`common.products.TensorCoreLinear` computes them on a Hopper. It keeps the weights of the layers a
            second time, in two parts of 16 bits.

    Attributes:
        tokens: int64 ``(batch, 1)``, the newest token of each sequence.
        lengths: int32 ``(batch,)``, how many positions of the cache are filled.
        logits: ``(batch, vocab)``, from which the newest tokens were taken; a process's columns of it.
        k_cache, v_cache: ``(layers, batch, max_seq_len, kv_heads, head_dim)``.
        one_launch: the persistent step, or None.

    Raises:
        ValueError: sizes that are not positive, other ``products``, or with ``persistent=True`` what such a step does
            not take.
        NotEnoughMemory: the cache, or the second copy of the weights, does not fit on the device; nothing was
            allocated.
    """

    def __init__(
        self,
        weights: Weights,
        batch: int,
        max_seq_len: int,
        *,
        group: Group | None = None,
        fused: bool | None = None,
        persistent: bool | None = None,
        products: str = "torch",
    ) -> None:
        if batch < 1 or max_seq_len < 2:
            raise ValueError(
                f"batch must be at least 1 and max_seq_len 2; got {batch} and {max_seq_len}"
            )
        c, w = weights.config, weights.embedding
        self._linear = [{name: linear_of(products) for name in MATRICES} for _ in weights.layers]
        what, elements = "the keys and values", c.cache(batch, max_seq_len)
        if products == "tensor cores" and can_split(w.dtype, w.device):
            what += " and the weights in two parts"
            elements += sum(
                getattr(layer, name).numel() for layer in weights.layers for name in MATRICES
            )
        expect_room(what, elements, w.dtype, w.device)
        self.weights, self.config, self.batch, self.max_seq_len = weights, c, batch, max_seq_len
        place = dict(device=w.device, dtype=w.dtype)
        shape = (c.layers, batch, max_seq_len, c.kv_heads, c.head_dim)
        self.k_cache, self.v_cache = torch.empty(shape, **place), torch.empty(shape, **place)
        rope = RoPE(c.head_dim, max_seq_len, c.rope_base, device=w.device, dtype=torch.float32)
        self.cos, self.sin = rope.cos, rope.sin
        self.tokens = torch.zeros(batch, 1, dtype=torch.int64, device=w.device)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=w.device)
        self.logits = torch.empty(batch, weights.lm_head.shape[0], **place)
        self.filled = 0  # the largest of lengths, known to the host
        self.group = group or Group()
        self.fused = w.is_cuda if fused is None else fused
        model = self._step_model()
        if persistent is None:
            persistent = fused is None and by_default(model, self.lengths, self.group)
        self.one_launch: PersistentStep | None = None
        if persistent:
            self.one_launch = PersistentStep(
                model, self.tokens, self.lengths, self.logits, group=self.group
            )
        self._advance = GraphedStep(self.tokens, self.lengths, max_seq_len)

    def prefill(self, prompt: Tensor) -> Tensor:
        """Begin anew with a prompt; the first new token of each sequence, int64 ``(batch, 1)``.

        Args:
            prompt: token ids ``(batch, seq)``, int64, of the same length for all sequences.

        Raises:
            ValueError: another shape, ids that are not in the vocabulary, or no position left for a new token.
        """
        seq = self._length_of(prompt)
        low, high = (int(n) for n in prompt.aminmax())
        if low < 0 or high >= self.config.vocab:
            raise ValueError(
                f"token ids must be from 0 to {self.config.vocab - 1}; got {low} to {high}"
            )
        self.lengths.fill_(seq)
        self.filled = seq
        self._forward(prompt)
        return self.tokens.clone()

    def step(self) -> Tensor:
        """Append the newest token and compute the next one.

        Returns:
            ``self.tokens``, int64 ``(batch, 1)``, which the next step overwrites.

        On a GPU the first step is captured as a CUDA graph, and later ones replay it.

        Raises:
            ValueError: no prompt yet, or no position left.
        """
        self._advance(self._step, self.filled)
        self.filled += 1
        return self.tokens

    def generate(self, prompt: Tensor, max_new_tokens: int) -> Tensor:
        """Greedy decoding: the new ids, int64 ``(batch, max_new_tokens)``.

        Args:
            prompt: token ids ``(batch, seq)``, int64.
            max_new_tokens: of each sequence; it is not ended by any token.

        Raises:
            ValueError: as :meth:`prefill`; or more new tokens than there are positions left.
        """
        room = self.max_seq_len - self._length_of(prompt) + 1
        if not 1 <= max_new_tokens <= room:
            raise ValueError(f"max_new_tokens must be from 1 to {room}; got {max_new_tokens}")
        new = torch.empty(self.batch, max_new_tokens, dtype=torch.int64, device=self.tokens.device)
        new[:, :1] = self.prefill(prompt)
        for i in range(1, max_new_tokens):
            new[:, i : i + 1] = self.step()
        return new

    def _length_of(self, prompt: Tensor) -> int:
        """Tokens of a prompt that fits."""
        expect("prompt", prompt, shape=(self.batch, "seq"), dtype=torch.int64, device=self.tokens.device)  # fmt: skip
        seq = prompt.shape[1]
        if not 1 <= seq < self.max_seq_len:
            raise ValueError(
                f"a prompt must have from 1 to {self.max_seq_len - 1} tokens; got {seq}"
            )
        return seq

    def _step(self) -> None:
        if self.one_launch is not None:
            self.one_launch()
        else:
            self.lengths += 1
            self._forward(self.tokens)

    def _step_model(self) -> StepModel:
        w, c = self.weights, self.config
        layers = [
            dict(
                norm_1=layer.attention_norm, qkv=layer.qkv, o=layer.o, norm_2=layer.mlp_norm, up=layer.gate_up,
                down=layer.down,
            )
            for layer in w.layers
        ]  # fmt: skip
        return StepModel(
            layers, self.k_cache, self.v_cache, w.embedding, w.norm, w.lm_head, c.heads, "swiglu", c.eps, cos=self.cos,
            sin=self.sin,
        )  # fmt: skip

    def _forward(self, tokens: Tensor) -> None:
        """Logits and the next token of each sequence, after these ``(batch, seq)``; lengths include them."""
        x = F.embedding(tokens, self.weights.embedding).flatten(0, 1)  # (batch * seq, hidden)
        if self.fused and x.shape[0] <= MAX_ROWS:
            self._few_rows(x)
        else:
            self._many_rows(x, tokens.shape[1])
        self.group.best(self.logits, self.tokens)

    def _few_rows(self, x: Tensor) -> None:
        """A step: four products a layer, with norms, SwiGLU and residuals in them.

        A product reads more rows than stay in its shared memory for each few rows of weights. In 16 bits to norm them
        each time would take it longer than a norm of its own.
        """
        w, eps = self.weights, self.config.eps
        apart = x.shape[0] > ROWS_WITH_NORM and x.element_size() == 2
        normed = torch.empty_like(x) if apart else None

        def of_norm(weight: Tensor, w: Tensor, activation: str | None = None) -> Tensor:
            if apart:
                add_rms_norm(x, None, weight, normed, eps)
                return product(normed, w, activation=activation)
            return product(x, w, norm=weight, eps=eps, activation=activation)

        for i, layer in enumerate(w.layers):
            qkv = of_norm(layer.attention_norm, layer.qkv)
            self._add_product(x, self._attention(i, qkv), layer.o)
            inner = of_norm(layer.mlp_norm, layer.gate_up, "swiglu")
            self._add_product(x, inner, layer.down)
        seq = x.shape[0] // self.batch
        product(x[seq - 1 :: seq], w.lm_head, norm=w.norm, eps=eps, out=self.logits)

    def _add_product(self, x: Tensor, y: Tensor, w: Tensor) -> None:
        """x += y @ w.T, of all processes."""
        if self.group.world == 1:
            product(y, w, residual=x, out=x)
        else:
            x += self.group.sum(product(y, w))

    def _many_rows(self, x: Tensor, seq: int) -> None:
        """A prompt: the products that the decoder was given."""
        w, eps = self.weights, self.config.eps
        normed, delta = torch.empty_like(x), None
        for i, (layer, linear) in enumerate(zip(w.layers, self._linear, strict=True)):
            add_rms_norm(x, delta, layer.attention_norm, normed, eps)
            o = self._attention(i, linear["qkv"](normed, layer.qkv))
            delta = self.group.sum(linear["o"](o, layer.o))
            add_rms_norm(x, delta, layer.mlp_norm, normed, eps)
            for some, to in zip(normed.split(ROWS), delta.split(ROWS), strict=True):
                both = linear["gate_up"](some, layer.gate_up)
                inner = torch.empty(len(some), self.config.inner, dtype=x.dtype, device=x.device)
                swiglu(both, inner)
                to.copy_(linear["down"](inner, layer.down))
                del both, inner
            delta = self.group.sum(delta)
        last = slice(seq - 1, None, seq)  # only the last position's logits are needed
        x, delta, normed = x[last], delta[last], normed[: self.batch]
        add_rms_norm(x, delta, w.norm, normed, eps)
        torch.mm(normed, w.lm_head.T, out=self.logits)

    def _attention(self, i: int, qkv: Tensor) -> Tensor:
        """Of layer i: qkv ``(batch * seq, ...)`` to ``(batch * seq, heads * head_dim)``; the cache gets k and v."""
        c, k_cache, v_cache = self.config, self.k_cache[i], self.v_cache[i]
        qkv = qkv.view(self.batch, -1, c.heads + 2 * c.kv_heads, c.head_dim)
        q, k, v = qkv.split((c.heads, c.kv_heads, c.kv_heads), dim=2)
        append_rope(q, k, v, k_cache, v_cache, seqlens_k=self.lengths, cos=self.cos, sin=self.sin)
        seq = qkv.shape[1]
        if seq == 1:
            o = decode_attention(q, k_cache, v_cache, seqlens_k=self.lengths, new_keys=1)
        else:
            o = fast_attention(q, k_cache[:, :seq], v_cache[:, :seq], causal=True)
        return o.view(self.batch * seq, -1)
