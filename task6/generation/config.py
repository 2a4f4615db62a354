"""The shapes of models: the course's own, and a real one."""

from dataclasses import dataclass, replace

HEAD_DIMS = (64, 128)  # of the kernels for prompts and for decode
WIDTH = 8  # of which hidden and inner are multiples: rows are read 16 bytes at a time


@dataclass(frozen=True)
class Config:
    """A decoder-only model of Llama's architecture.

    Raises:
        ValueError: sizes that do not fit together.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int  # of the MLP
    vocab: int
    tied: bool = False  # whether the last product's weights are the embedding's
    rope_base: float = 10_000.0
    eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "inner", "vocab"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive; got {getattr(self, name)}")
        for name in ("hidden", "inner"):
            if getattr(self, name) % WIDTH:
                raise ValueError(
                    f"{name} must be a multiple of {WIDTH}, in each process; got {getattr(self, name)}"
                )
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide heads; got {self.heads} and {self.kv_heads}")
        if self.head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim must be one of {HEAD_DIMS}; got {self.head_dim}")

    def share(self, world: int) -> "Config":
        """What each of several processes has: some of the heads, and some columns of the MLP.

        Raises:
            ValueError: the number of processes does not divide them.
        """
        for name in ("heads", "kv_heads", "inner", "vocab"):
            if getattr(self, name) % world:
                raise ValueError(
                    f"the number of processes must divide {name}; got {world} and {getattr(self, name)}"
                )
        parts = {name: getattr(self, name) // world for name in ("heads", "kv_heads", "inner")}
        return replace(self, **parts)

    @property
    def qkv_rows(self) -> int:
        """Of q, k and v side by side."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def weights(self) -> int:
        """How many parameters there are."""
        layer = self.hidden * (self.qkv_rows + self.heads * self.head_dim + 3 * self.inner + 2)
        return self.layers * layer + self.hidden + (2 - self.tied) * self.vocab * self.hidden

    def cache(self, batch: int, length: int) -> int:
        """How many numbers the keys and values of so many positions are."""
        return 2 * self.layers * batch * length * self.kv_heads * self.head_dim


CONFIGS = {
    "tiny": Config(2, 256, 4, 2, 64, 512, 1000),  # for a laptop
    "course": Config(24, 4096, 32, 32, 128, 4 * 4096, 8192),
    # Llama-3.2-1B without its scaling of RoPE for texts above 8,192 tokens
    "llama-3.2-1b": Config(16, 2048, 32, 8, 64, 8192, 128_256, tied=True, rope_base=500_000.0, eps=1e-5),
}  # fmt: skip


def find_config(name: str) -> Config:
    """One of CONFIGS.

    Raises:
        ValueError: another name.
    """
    if name not in CONFIGS:
        raise ValueError(f"the configurations are {', '.join(CONFIGS)}; got {name!r}")
    return CONFIGS[name]
