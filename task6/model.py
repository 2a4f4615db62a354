"""Task 6: a dummy language model around your attention: the architecture of Llama, with random weights.

    tokens -> embedding -> [ x + attention(norm(x)),  x + mlp(norm(x)) ] * num_layers -> norm -> lm_head -> logits

No weights are loaded and none are trained, so the text is nonsense; the work per token is that of a real model.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.inputs import check_head_dim, check_head_split, describe, expect
from common.memory import NotEnoughMemory, free_memory, gib
from task5.attention import check_position
from task6.attention import customAttention
from task6.rope import RoPE

__all__ = [
    "customAttention",
    "customDecoderLayer",
    "customMLP",
    "customModel",
    "generate",
    "memory_needed",
]

# for each layer k and v, both (batch, max_seq_len, hidden_dim)
KVCache = Sequence[tuple[Tensor, Tensor]]

TOKEN_DTYPES = (torch.int64, torch.int32)
MLP_FACTOR = 4  # inner width of the MLP, in units of hidden_dim


class customMLP(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``. [Shazeer] arXiv:2002.05202.

    Args:
        hidden_dim: width outside; inside it is four times as wide.
        device, dtype: of the weights; PyTorch's defaults if None.
    """

    def __init__(
        self,
        hidden_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        inner = MLP_FACTOR * hidden_dim
        self.gate = nn.Linear(hidden_dim, inner, bias=False, device=device, dtype=dtype)
        self.up = nn.Linear(hidden_dim, inner, bias=False, device=device, dtype=dtype)
        self.down = nn.Linear(inner, hidden_dim, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """``(..., hidden_dim)`` to the same shape."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class customDecoderLayer(nn.Module):
    """Attention and MLP, each on the normed input and added to it (pre-norm).

    The norm is RMSNorm, as in other models with RoPE and SwiGLU (Llama, Mistral, Qwen): LayerNorm without the mean and
    the bias, one pass fewer over the data, and no less accurate. [RMSNorm] arXiv:1910.07467.

    Args:
        hidden_dim, num_heads, rope, device, dtype: see :class:`customAttention`.
    """

    def __init__(
        self,
        hidden_dim: int,
        num_heads: int,
        rope: RoPE,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.attention_norm = _rms_norm(hidden_dim, device, dtype)
        self.attention = customAttention(hidden_dim, num_heads, rope, device=device, dtype=dtype)
        self.mlp_norm = _rms_norm(hidden_dim, device, dtype)
        self.mlp = customMLP(hidden_dim, device=device, dtype=dtype)

    def forward(self, x: Tensor, kv_cache: tuple[Tensor, Tensor], current_pos: int = 0) -> Tensor:
        """``(batch, seq, hidden_dim)`` to the same shape; the cache is extended in place."""
        x = x + self.attention(self.attention_norm(x), kv_cache, current_pos)
        return x + self.mlp(self.mlp_norm(x))


class customModel(nn.Module):
    """Token ids in, logits out. For inference: the kernels have no backward pass.

    Args:
        hidden_dim: width of the model.
        num_heads: heads; must divide ``hidden_dim`` into an even head_dim of at most 128.
        num_layers: decoder layers.
        vocab_size: size of the vocabulary.
        max_seq_len: positions of a sequence, prompt and generated tokens together.
        device, dtype: of the weights; PyTorch's defaults if None, so that ``with torch.device("cuda"):
            customModel(...)`` works too. The weights are made there and are never in the host's memory.

    The weights are random, from PyTorch's generator: ``torch.manual_seed`` repeats them.

    Raises:
        ValueError: sizes that do not fit.
        NotEnoughMemory: the weights do not fit on the device; nothing was allocated.
    """

    def __init__(
        self,
        hidden_dim: int,
        num_heads: int,
        num_layers: int,
        vocab_size: int,
        max_seq_len: int = 4096,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if min(num_layers, vocab_size, max_seq_len) < 1:
            raise ValueError(
                "num_layers, vocab_size and max_seq_len must be positive; "
                f"got {num_layers}, {vocab_size} and {max_seq_len}"
            )
        head_dim = check_head_split(hidden_dim, num_heads)
        check_head_dim(head_dim)
        self.hidden_dim, self.num_heads, self.num_layers = hidden_dim, num_heads, num_layers
        self.vocab_size, self.max_seq_len = vocab_size, max_seq_len
        device = torch.get_default_device() if device is None else torch.device(device)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        _expect_room(
            "the weights", count_weights(hidden_dim, num_layers, vocab_size), dtype, device
        )
        place = dict(device=device, dtype=dtype)
        rope = RoPE(head_dim, max_seq_len, **place)  # one table, shared by the layers
        self.embedding = nn.Embedding(vocab_size, hidden_dim, **place)
        self.layers = nn.ModuleList(
            customDecoderLayer(hidden_dim, num_heads, rope, **place) for _ in range(num_layers)
        )
        self.norm = _rms_norm(hidden_dim, **place)
        self.lm_head = nn.Linear(hidden_dim, vocab_size, bias=False, **place)
        self.requires_grad_(False)
        for module in self.modules():
            if isinstance(
                module, nn.Linear
            ):  # outputs of the inputs' magnitude: every layer counts
                nn.init.normal_(module.weight, std=module.in_features**-0.5)

    def new_kv_cache(self, batch: int, max_seq_len: int | None = None) -> KVCache:
        """An empty cache on the weights' device, uninitialised: positions are read only after they are written.

        Args:
            batch: sequences.
            max_seq_len: positions of each; the model's own ``max_seq_len`` if None.

        Returns:
            For each layer ``(k_cache, v_cache)``, each ``(batch, max_seq_len, hidden_dim)``.

        Raises:
            NotEnoughMemory: it does not fit on the device; nothing was allocated.
        """
        length = self.max_seq_len if max_seq_len is None else max_seq_len
        w = self.embedding.weight
        shape = (self.num_layers, 2, batch, length, self.hidden_dim)
        _expect_room("the keys and values of the cache", math.prod(shape), w.dtype, w.device)
        cache = torch.empty(shape, dtype=w.dtype, device=w.device)
        return [(k, v) for k, v in cache]

    def forward(
        self, x: Tensor, kv_cache: KVCache | None = None, current_pos: int = 0
    ) -> tuple[Tensor, KVCache]:
        """Logits for x, which continues what the cache holds.

        Args:
            x: token ids ``(batch, seq)``, int64 or int32: a prompt, a chunk of one, or (seq 1) the latest token.
            kv_cache: from :meth:`new_kv_cache` or an earlier call; extended in place. None makes one.
            current_pos: how many positions of the cache are filled.

        Returns:
            logits: ``(batch, seq, vocab_size)``. After a prompt only the last row is needed to continue; the others
                cost half a per cent of the time to the first token in the course's configuration, and let a test
                compare every position.
            kv_cache: the one that was passed, or the new one.

        Raises:
            ValueError: arguments that do not fit; the cache is then untouched. Token ids are checked on the CPU, and
                on a GPU those of a prompt. In a decode step the check would wait for the GPU; an id out of range is
                caught there by PyTorch's own assertion.
        """
        self._check(x, kv_cache, current_pos)
        if kv_cache is None:
            kv_cache = self.new_kv_cache(x.shape[0])
        h = self.embedding(x)  # (batch, seq, hidden_dim)
        for layer, layer_cache in zip(self.layers, kv_cache, strict=True):
            h = layer(h, layer_cache, current_pos)
        return self.lm_head(self.norm(h)), kv_cache

    def _check(self, x: Tensor, kv_cache: KVCache | None, current_pos: int) -> None:
        device = self.embedding.weight.device
        expect("x", x, shape=("batch", "seq"), dtype=TOKEN_DTYPES, device=device)
        batch, seq = x.shape
        if x.numel() == 0:
            raise ValueError(f"x must hold at least one token for each sequence; got {describe(x)}")
        if current_pos < 0 or current_pos + seq > self.max_seq_len:
            raise ValueError(
                f"the model has {self.max_seq_len} positions (max_seq_len); "
                f"{seq} tokens from current_pos {current_pos} do not fit"
            )
        if kv_cache is None:
            if current_pos:
                raise ValueError(
                    f"current_pos {current_pos} needs the kv_cache that holds the positions before it; got None"
                )
        else:
            self._check_cache(kv_cache, batch)
            check_position(current_pos, seq, kv_cache[0][0].shape[1])
        if x.device.type == "cpu" or seq > 1:
            low, high = (int(n) for n in x.aminmax())
            if low < 0 or high >= self.vocab_size:
                raise ValueError(
                    f"token ids must be from 0 to {self.vocab_size - 1}; got {low} to {high}"
                )

    def _check_cache(self, kv_cache: KVCache, batch: int) -> None:
        """ValueError unless every layer's caches fit; checked before the first is written."""
        if len(kv_cache) != self.num_layers or any(len(pair) != 2 for pair in kv_cache):
            raise ValueError(
                f"kv_cache must have a pair (k, v) for each of {self.num_layers} layers; "
                f"got {len(kv_cache)} entries"
            )
        w = self.embedding.weight
        k = kv_cache[0][0]
        length = k.shape[1] if isinstance(k, Tensor) and k.dim() == 3 else "max_seq_len"
        shape = (batch, length, self.hidden_dim)
        for i, pair in enumerate(kv_cache):
            for letter, t in zip("kv", pair, strict=True):
                name = f"{letter} of layer {i} in kv_cache"
                expect(name, t, shape=shape, dtype=w.dtype, device=w.device)


def generate(model: customModel, prompt: Tensor, max_new_tokens: int) -> Tensor:
    """Greedy decoding: one prefill, then one token at a time. The ids stay on the device.

    Args:
        model: any model with :class:`customModel`'s forward.
        prompt: token ids ``(batch, seq)``.
        max_new_tokens: tokens to generate.

    Returns:
        The new ids ``(batch, max_new_tokens)``.

    Raises:
        ValueError: an empty prompt, or more positions than the model has.
    """
    expect("prompt", prompt, shape=("batch", "seq"), dtype=TOKEN_DTYPES)
    batch, seq = prompt.shape
    if max_new_tokens < 1 or seq + max_new_tokens > model.max_seq_len:
        raise ValueError(
            f"the model has {model.max_seq_len} positions; a prompt of {seq} leaves room for "
            f"1 to {model.max_seq_len - seq} new tokens; got max_new_tokens {max_new_tokens}"
        )
    tokens = torch.empty(batch, max_new_tokens, dtype=prompt.dtype, device=prompt.device)
    x, kv_cache = prompt, model.new_kv_cache(batch, seq + max_new_tokens)
    for i in range(max_new_tokens):
        current_pos = seq + i - 1 if i else 0
        logits, kv_cache = model(x, kv_cache, current_pos)
        x = logits[:, -1:].argmax(-1).to(prompt.dtype)  # (batch, 1)
        tokens[:, i : i + 1] = x
    return tokens


def memory_needed(
    hidden_dim: int,
    num_layers: int,
    vocab_size: int,
    max_seq_len: int,
    *,
    batch: int,
    seq: int,
    dtype: torch.dtype = torch.float32,
) -> dict[str, int]:
    """Bytes that a model takes on its device, computed before any are allocated.

    Args:
        hidden_dim, num_layers, vocab_size: the model's.
        max_seq_len: positions of the cache.
        batch, seq: the largest input of one forward pass: a whole prompt.
        dtype: of weights, cache and activations.

    Returns:
        ``weights``, ``kv_cache``, ``activations`` (at their peak) and their sum, ``total``.
    """
    size = dtype.itemsize
    weights = count_weights(hidden_dim, num_layers, vocab_size)
    kv_cache = 2 * num_layers * batch * max_seq_len * hidden_dim
    # Per token the MLP holds x, norm(x) and three tensors of the inner width; the last layer x, norm(x), logits.
    activations = batch * seq * (2 * hidden_dim + max(3 * MLP_FACTOR * hidden_dim, vocab_size))
    needed = dict(weights=weights * size, kv_cache=kv_cache * size, activations=activations * size)
    return needed | {"total": sum(needed.values())}


def count_weights(hidden_dim: int, num_layers: int, vocab_size: int) -> int:
    """The number of :class:`customModel`'s parameters."""
    attention, mlp, norms = 4 * hidden_dim**2, 3 * MLP_FACTOR * hidden_dim**2, 2 * hidden_dim
    return num_layers * (attention + mlp + norms) + hidden_dim + 2 * vocab_size * hidden_dim


def _expect_room(what: str, elements: int, dtype: torch.dtype, device: torch.device) -> None:
    """NotEnoughMemory if they do not fit: a GPU would fail later, and Linux would kill the process."""
    if device.type not in ("cpu", "cuda"):
        return
    needed, free = elements * dtype.itemsize, free_memory(device)[0]
    if needed > free:
        raise NotEnoughMemory(f"{what} need {gib(needed)}; {gib(free)} are free on {device}")


def _rms_norm(
    hidden_dim: int, device: torch.device | str | None, dtype: torch.dtype | None
) -> nn.RMSNorm:
    return nn.RMSNorm(hidden_dim, eps=1e-6, device=device, dtype=dtype)
