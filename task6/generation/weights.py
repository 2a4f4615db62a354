"""A model's weights as the decoder reads them: q, k, v in one matrix, gate and up in another."""

from dataclasses import dataclass

import torch
from torch import Tensor

from common.memory import NotEnoughMemory, free_memory, gib
from task6.generation.config import Config
from task6.model import customModel


@dataclass(frozen=True)
class Layer:
    """One layer; matrices as ``torch.nn.Linear`` has them, ``(outputs, inputs)``."""

    attention_norm: Tensor  # (hidden,)
    qkv: Tensor  # ((heads + 2 kv_heads) head_dim, hidden)
    o: Tensor  # (hidden, heads head_dim)
    mlp_norm: Tensor  # (hidden,)
    gate_up: Tensor  # (2 inner, hidden)
    down: Tensor  # (hidden, inner)


@dataclass(frozen=True)
class Weights:
    """All of a model's weights, on one device and of one dtype."""

    config: Config
    embedding: Tensor  # (vocab, hidden)
    layers: tuple[Layer, ...]
    norm: Tensor  # (hidden,)
    lm_head: Tensor  # (vocab, hidden); the embedding itself where they are tied

    @classmethod
    def of(cls, model: customModel) -> "Weights":
        """The weights of a :class:`task6.model.customModel`, shared with it.

        Nothing is held twice: gate and up become views of one matrix, layer by layer.
        """
        first = model.layers[0]
        config = Config(
            model.num_layers, model.hidden_dim, model.num_heads, model.num_heads,
            model.hidden_dim // model.num_heads, first.mlp.gate.out_features, model.vocab_size,
            rope_base=first.attention.rope.base, eps=model.norm.eps,
        )  # fmt: skip
        return cls(
            config,
            model.embedding.weight,
            tuple(
                Layer(
                    layer.attention_norm.weight, layer.attention.qkv_proj.weight,
                    layer.attention.o_proj.weight, layer.mlp_norm.weight,
                    _side_by_side(layer.mlp.gate, layer.mlp.up), layer.mlp.down.weight,
                )
                for layer in model.layers
            ),
            model.norm.weight,
            model.lm_head.weight,
        )  # fmt: skip

    @classmethod
    def random(
        cls,
        config: Config,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> "Weights":
        """Weights that keep a layer's outputs as large as its inputs; ``torch.manual_seed`` repeats them.

        Raises:
            NotEnoughMemory: they do not fit on the device; nothing was allocated.
        """
        expect_room("the weights", config.weights, dtype, torch.device(device))
        place = dict(device=device, dtype=dtype)

        def matrix(rows: int, columns: int) -> Tensor:
            return torch.empty(rows, columns, **place).normal_(std=columns**-0.5)

        c, ones = config, torch.ones(config.hidden, **place)
        embedding = torch.empty(c.vocab, c.hidden, **place).normal_()
        layers = tuple(
            Layer(
                ones.clone(), matrix(c.qkv_rows, c.hidden), matrix(c.hidden, c.heads * c.head_dim),
                ones.clone(), matrix(2 * c.inner, c.hidden), matrix(c.hidden, c.inner),
            )
            for _ in range(c.layers)
        )  # fmt: skip
        lm_head = embedding if c.tied else matrix(c.vocab, c.hidden)
        return cls(c, embedding, layers, ones, lm_head)


def expect_room(what: str, elements: int, dtype: torch.dtype, device: torch.device) -> None:
    """NotEnoughMemory if they do not fit: what is needed, and what is free."""
    needed, free = elements * dtype.itemsize, free_memory(device)[0]
    if needed > free:
        raise NotEnoughMemory(f"{what} need {gib(needed)}; {gib(free)} are free on {device}")


def _side_by_side(gate: torch.nn.Linear, up: torch.nn.Linear) -> Tensor:
    both = torch.cat((gate.weight, up.weight))
    gate.weight.data, up.weight.data = both.chunk(2)
    return both
