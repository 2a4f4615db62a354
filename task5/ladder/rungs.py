"""The rungs of decode: the numbered sources of this folder. :mod:`task5.ladder.call` calls them."""

import re
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Rung:
    """One kernel of the ladder."""

    number: int
    name: str
    file: str
    title: str  # the first line of its source

    def __str__(self) -> str:
        return f"rung {self.number} ({self.name})"

    @property
    def label(self) -> str:
        """Its name in tables and records."""
        return f"{self.number} {self.name}"

    @property
    def source(self) -> Path:
        """Its file."""
        return FOLDER / self.file


def _rung(source: Path) -> Rung:
    number, _, name = source.stem.partition("_")
    first = source.read_text("utf-8").partition("\n")[0]
    title = re.sub(r"^//\s*(Rung \d+\W\s*)?", "", first).rstrip(".")
    return Rung(int(number), name.replace("_", " "), source.name, title)


RUNGS = tuple(_rung(source) for source in sorted(FOLDER.glob("[0-9][0-9]_*.cu")))
