"""What each stage is worth, from points.toml, and what a run of its checks has earned."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("points.toml")


@dataclass(frozen=True)
class Worth:
    """What a stage is worth; points.toml says what the fields mean.

    Raises:
        ValueError: a number is out of its range, or the bands are not in falling order.
    """

    points: float
    check: float = 1.0
    speed: float = 0.0
    bands: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        if not self.points >= 0:
            raise ValueError(f"points must be 0 or more; got {self.points}")
        parts = {"check": self.check, "speed": self.speed}
        parts |= {f"the part of {ratio} in bands": part for ratio, part in self.bands}
        for name, part in parts.items():
            if not 0 <= part <= 1:
                raise ValueError(f"{name} must be from 0 to 1; got {part}")
        if list(self.bands) != sorted(self.bands, reverse=True):
            raise ValueError(f"bands must begin with the highest ratio; got {self.bands}")
        if self.speed and not self.bands:
            raise ValueError("speed needs bands")


def read(text: str) -> dict[str, Worth]:
    """What each stage is worth, by name.

    Raises:
        ValueError: the text is no TOML, has an unknown name, or numbers that make no sense; names the stage.
    """
    worth = {}
    for stage, values in tomllib.loads(text).items():
        try:
            bands = tuple((ratio, part) for ratio, part in values.get("bands", ()))
            worth[stage] = Worth(**values | {"bands": bands})
        except (TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{FILE.name}, {stage}: {error}") from None
    return worth


WORTH = read(FILE.read_text(encoding="utf-8"))
POINTS = {stage: worth.points for stage, worth in WORTH.items()}


def earned(worth: Worth, groups: Sequence[Mapping[str, Any]]) -> float:
    """A stage's points are shared evenly among its groups; a group counts if all its checks pass.

    One in which only the check build has found something loses the part of its points that ``worth.check`` says.
    Groups whose checks pass before anything is written earn nothing.
    """
    counted = [group for group in groups if not group.get("given")]
    parts = [
        1.0 if g["status"] == "passed" else 1 - worth.check if g.get("only_check_build") else 0.0
        for g in counted
    ]
    return round(worth.points * sum(parts) / len(parts), 2) if parts else 0.0
