"""What a machine reaches, and where measured kernels are below that. [Roofline] Williams, Waterman, Patterson 2009."""

from dataclasses import dataclass

from common.report.shapes import Sizes, Work, value


@dataclass(frozen=True)
class Roof:
    """Measured ceilings.

    Attributes:
        flops: FLOP/s that arithmetic reaches without memory.
        bandwidth: bytes/s of a read of memory, far beyond the caches.
        of: how they were measured, for texts.
        cache: bytes/s of reading again and again what fits in a cache, where it was measured.
    """

    flops: float
    bandwidth: float
    of: str
    cache: float | None = None

    @property
    def ridge(self) -> float:
        """The intensity, FLOP/byte, from which on arithmetic is the limit and not memory."""
        return self.flops / self.bandwidth

    def at(self, intensity: float) -> float:
        """FLOP/s that a kernel of this intensity can reach."""
        return min(self.flops, intensity * self.bandwidth)

    def limit(self, intensity: float) -> str:
        """Which of the two limits it."""
        return "memory" if intensity < self.ridge else "compute"


@dataclass(frozen=True)
class Dot:
    """A kernel at one sequence length.

    Attributes:
        seconds: a call's time; None where there is none, and ``why`` says why.
    """

    work: Work
    sizes: Sizes
    seconds: float | None
    why: str = ""

    @property
    def seq(self) -> int:
        return self.sizes["S"]

    @property
    def intensity(self) -> float:
        return self.work.intensity(self.sizes)

    @property
    def flops(self) -> int:
        return value(self.work.flops, self.sizes)

    @property
    def bytes(self) -> int:
        return value(self.work.bytes, self.sizes)

    @property
    def rate(self) -> float | None:
        """FLOP/s."""
        return self.flops / self.seconds if self.seconds else None
