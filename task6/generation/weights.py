"""A model's weights as the decoder reads them: q, k, v in one matrix, gate and up in another."""

from dataclasses import dataclass

import torch
from torch import Tensor

from common.memory import NotEnoughMemory, free_memory, gib
from task6.generation.config import Config
from task6.generation.parallel import Group
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
    lm_head: Tensor  # (vocab, hidden), or a process's rows of it; the embedding itself where they are tied

    @property
    def count(self) -> int:
        """How many parameters this process has."""
        of_layers = (t for layer in self.layers for t in vars(layer).values())
        head = () if self.config.tied else (self.lm_head,)
        return sum(t.numel() for t in (self.embedding, self.norm, *of_layers, *head))

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
        group: Group | None = None,
    ) -> "Weights":
        """Weights that keep a layer's outputs as large as its inputs; ``torch.manual_seed`` repeats them.

        Args:
            config: the whole model's.
            device, dtype: of the weights.
            group: of whose processes each gets its share, of the same weights if all have the same seed. The result's
                ``config`` is the share's.

        Raises:
            ValueError: the number of processes does not divide the model.
            NotEnoughMemory: they do not fit on the device; nothing was allocated.
        """
        group = group or Group()
        expect_room("the weights", config.share(group.world).weights, dtype, torch.device(device))
        place = dict(device=device, dtype=dtype)

        def matrix(rows: int, columns: int) -> Tensor:
            return torch.empty(rows, columns, **place).normal_(std=columns**-0.5)

        c, ones = config, torch.ones(config.hidden, **place)
        embedding = torch.empty(c.vocab, c.hidden, **place).normal_()
        layers = tuple(
            _share(
                Layer(
                    ones.clone(), matrix(c.qkv_rows, c.hidden), matrix(c.hidden, c.heads * c.head_dim),
                    ones.clone(), matrix(2 * c.inner, c.hidden), matrix(c.hidden, c.inner),
                ), c, group,
            )
            for _ in range(c.layers)
        )  # fmt: skip
        lm_head = embedding if c.tied else matrix(c.vocab, c.hidden)
        lm_head = lm_head.chunk(group.world)[group.rank]
        return cls(c.share(group.world), embedding, layers, ones, lm_head)


def expect_room(what: str, elements: int, dtype: torch.dtype, device: torch.device) -> None:
    """NotEnoughMemory if they do not fit: what is needed, and what is free."""
    needed, free = elements * dtype.itemsize, free_memory(device)[0]
    if needed > free:
        raise NotEnoughMemory(f"{what} need {gib(needed)}; {gib(free)} are free on {device}")


def _share(layer: Layer, config: Config, group: Group) -> Layer:
    """A process's share: rows of what has a row per head or column of the MLP, columns of what sums over them."""
    if group.world == 1:
        return layer
    kv = config.kv_heads * config.head_dim
    qkv = layer.qkv.split((config.heads * config.head_dim, kv, kv))

    def rows(*matrices: Tensor) -> Tensor:
        return torch.cat([m.chunk(group.world)[group.rank] for m in matrices])

    o, down = (m.chunk(group.world, 1)[group.rank].contiguous() for m in (layer.o, layer.down))
    gate_up = rows(*layer.gate_up.chunk(2))
    return Layer(layer.attention_norm, rows(*qkv), o, layer.mlp_norm, gate_up, down)


def _side_by_side(gate: torch.nn.Linear, up: torch.nn.Linear) -> Tensor:
    first, second = gate.weight.data, up.weight.data
    behind = first.data_ptr() + first.numel() * first.element_size() == second.data_ptr()
    if behind and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr():
        return first.as_strided(
            (2 * len(first), first.shape[1]), first.stride()
        )  # as they were left before
    both = torch.cat((first, second))
    gate.weight.data, up.weight.data = both.chunk(2)
    return both
