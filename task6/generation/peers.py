"""What the decoder is compared with, on the same weights: task 6's model, and transformers' Llama."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from task6.generation.decoder import Decoder
from task6.generation.measure import Generator
from task6.generation.parallel import Group
from task6.generation.weights import Weights
from task6.model import MLP_FACTOR, customModel
from task6.rope import RoPE

ONE_LAUNCH = "the decoder, a step in one launch"
READABLE = "task 6's model"
LLAMA = "Hugging Face, SDPA"
COMPILED = "Hugging Face, compiled with a static cache"


class Readable:
    """Task 6's model, with the attention of tasks 4 and 5; its weights are views of ``weights``.

    Args:
        weights: of the model.
        batch: sequences.
        max_seq_len: positions of each.

    Raises:
        ValueError: an architecture that :class:`task6.model.customModel` does not have.
    """

    def __init__(self, weights: Weights, batch: int, max_seq_len: int) -> None:
        c = weights.config
        plain = c.kv_heads == c.heads and c.hidden == c.heads * c.head_dim and c.eps == 1e-6
        if not plain or c.inner != MLP_FACTOR * c.hidden or c.tied:
            raise ValueError(
                "it has as many kv heads as heads, no tied embedding, and an MLP four times as wide"
            )
        place = dict(device=weights.embedding.device, dtype=weights.embedding.dtype)
        self._model = customModel(
            c.hidden, c.heads, c.layers, c.vocab, max_seq_len, device="meta", dtype=place["dtype"]
        )
        state = {"embedding": weights.embedding, "norm": weights.norm, "lm_head": weights.lm_head}
        rope = RoPE(c.head_dim, max_seq_len, c.rope_base, **place)
        for i, (layer, module) in enumerate(zip(weights.layers, self._model.layers, strict=True)):
            gate, up = layer.gate_up.chunk(2)
            names = {
                "attention_norm": layer.attention_norm, "attention.qkv_proj": layer.qkv, "attention.o_proj": layer.o,
                "mlp_norm": layer.mlp_norm, "mlp.gate": gate, "mlp.up": up, "mlp.down": layer.down,
            }  # fmt: skip
            state |= {f"layers.{i}.{name}": t for name, t in names.items()}
            module.attention.rope = rope
        self._model.load_state_dict({f"{k}.weight": t for k, t in state.items()}, assign=True)
        self._model.requires_grad_(False)
        self._cache = self._model.new_kv_cache(batch, max_seq_len)

    def prefill(self, prompt: Tensor) -> Tensor:
        """As :meth:`Generator.prefill`."""
        self._filled = 0
        return self._next(prompt)

    def step(self) -> Tensor:
        """As :meth:`Generator.step`."""
        return self._next(self._tokens)

    def _next(self, tokens: Tensor) -> Tensor:
        logits, _ = self._model(tokens, self._cache, self._filled)
        self._filled += tokens.shape[1]
        self._tokens = logits[:, -1:].argmax(-1)
        return self._tokens


class HuggingFace:
    """transformers' Llama with SDPA: as it comes, with a cache that grows; or compiled, with one of a fixed length.

    Args:
        weights: of the model, which shares them.
        batch: sequences.
        max_seq_len: positions of each.
        compiled: steps run through ``torch.compile(mode="reduce-overhead")``, which takes a minute.
    """

    def __init__(
        self, weights: Weights, batch: int, max_seq_len: int, *, compiled: bool = False
    ) -> None:
        self._model = llama(weights)
        self._run: Callable = self._model
        self._fixed = None
        if compiled:
            torch.compiler.reset()  # nothing is kept of a model that was compiled before
            self._run = torch.compile(self._model.forward, mode="reduce-overhead")
            self._fixed = StaticCache(config=self._model.config, max_cache_len=max_seq_len)

    def prefill(self, prompt: Tensor) -> Tensor:
        """As :meth:`Generator.prefill`."""
        if self._fixed is None:
            self._cache = DynamicCache(config=self._model.config)
        else:
            self._cache = self._fixed
            self._cache.reset()
        return self._next(self._model, prompt)

    def step(self) -> Tensor:
        """As :meth:`Generator.step`."""
        return self._next(self._run, self._tokens)

    @torch.no_grad()
    def _next(self, run: Callable, tokens: Tensor) -> Tensor:
        out = run(tokens, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._tokens = out.logits[:, -1:].argmax(-1)
        return self._tokens


Make = Callable[[Weights, int, int], Generator]  # of batch and max_seq_len


def compiled(weights: Weights, batch: int, max_seq_len: int) -> HuggingFace:
    """The one whose steps are compiled."""
    return HuggingFace(weights, batch, max_seq_len, compiled=True)


def one_launch(
    weights: Weights, batch: int, max_seq_len: int, *, group: Group | None = None
) -> Decoder:
    """The decoder with a persistent step; ValueError without a GPU, where it can be checked and not timed."""
    if not weights.embedding.is_cuda:
        raise ValueError("a step in one launch is timed on a Hopper GPU alone")
    return Decoder(weights, batch, max_seq_len, group=group, persistent=True)


PEERS: dict[str, Make] = {ONE_LAUNCH: one_launch, READABLE: Readable, LLAMA: HuggingFace}


def llama(weights: Weights) -> LlamaForCausalLM:
    """transformers' Llama, whose weights are views of these."""
    c = weights.config
    config = LlamaConfig(
        vocab_size=c.vocab, hidden_size=c.hidden, intermediate_size=c.inner, num_hidden_layers=c.layers,
        num_attention_heads=c.heads, num_key_value_heads=c.kv_heads, head_dim=c.head_dim, rms_norm_eps=c.eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_base}, tie_word_embeddings=c.tied,
        max_position_embeddings=2**17, bos_token_id=None, eos_token_id=None, attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    state = {"model.embed_tokens": weights.embedding, "model.norm": weights.norm}
    kv = c.kv_heads * c.head_dim
    for i, layer in enumerate(weights.layers):
        q, k, v = layer.qkv.split((c.heads * c.head_dim, kv, kv))
        gate, up = layer.gate_up.chunk(2)
        names = {
            "input_layernorm": layer.attention_norm, "self_attn.q_proj": q, "self_attn.k_proj": k,
            "self_attn.v_proj": v, "self_attn.o_proj": layer.o, "post_attention_layernorm": layer.mlp_norm,
            "mlp.gate_proj": gate, "mlp.up_proj": up, "mlp.down_proj": layer.down,
        }  # fmt: skip
        state |= {f"model.layers.{i}.{name}": t for name, t in names.items()}
    state["lm_head"] = weights.lm_head
    model.load_state_dict({f"{name}.weight": t for name, t in state.items()}, assign=True)
    with weights.embedding.device:  # what follows from the configuration is not among the weights
        model.model.rotary_emb = LlamaRotaryEmbedding(config)
    return model.eval()
