"""Random inputs: new ones in every run, the same ones with the same seed."""

import argparse
import hashlib
import secrets

import torch
from torch import Tensor

_MADE_ON_CPU = (
    1 << 24
)  # elements; up to this size the CPU and the GPU get the same numbers from one seed


def new_seed() -> int:
    """An unpredictable seed."""
    return secrets.randbelow(1 << 31)


def seed_of(text: str) -> int:
    """What a command is given as its seed: from 0 to 2**31 - 1, which all of its libraries take.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if not text.isdecimal() or int(text) >= 1 << 31:
        raise argparse.ArgumentTypeError(
            f"a seed is a whole number from 0 to {(1 << 31) - 1}; got {text}"
        )
    return int(text)


class Rng:
    """Random tensors on one device.

    The numbers depend on the seed and the names alone, so a case has the same inputs whether it runs by itself or
    among all the others.

    Args:
        seed: the run's seed.
        device: where the tensors go.
        names: what they are for: suite, check, case.
    """

    def __init__(self, seed: int, device: torch.device | str, *names: str) -> None:
        digest = hashlib.sha256("\0".join([str(seed), *names]).encode()).digest()
        self.device = torch.device(device)
        self.seed = int.from_bytes(digest[:7], "little")
        self._generators: dict[torch.device, torch.Generator] = {}

    def randn(
        self,
        *shape: int,
        dtype: torch.dtype = torch.float32,
        scale: float = 1.0,
        shift: float = 0.0,
    ) -> Tensor:
        """Normal numbers times ``scale`` plus ``shift``, rounded to ``dtype`` at the end."""
        where = self._where(shape)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        out = torch.randn(*shape, dtype=wide, device=where, generator=self._generator(where))
        return (out * scale + shift).to(self.device, dtype)

    def uniform(
        self, low: float, high: float, *shape: int, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Numbers, uniform over [low, high)."""
        where = self._where(shape)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        out = torch.rand(*shape, dtype=wide, device=where, generator=self._generator(where))
        return (low + (high - low) * out).to(self.device, dtype)

    def integers(
        self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64
    ) -> Tensor:
        """Whole numbers, ``low <= n < high``."""
        where = self._where(shape)
        generator = self._generator(where)
        out = torch.randint(low, high, shape, dtype=dtype, device=where, generator=generator)
        return out.to(self.device)

    def permutation(self, n: int) -> Tensor:
        """0 .. n-1 in random order (int64)."""
        cpu = torch.device("cpu")
        return torch.randperm(n, generator=self._generator(cpu)).to(self.device)

    def _where(self, shape: tuple[int, ...]) -> torch.device:
        elements = 1
        for n in shape:
            elements *= n
        return torch.device("cpu") if elements <= _MADE_ON_CPU else self.device

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self.seed)
        return self._generators[device]
