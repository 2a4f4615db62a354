"""A table that the terminal and the Markdown files both show."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table


@dataclass
class Grid:
    """Columns and rows of text; the first column names the row. ``bars``: whether each bar in it is met."""

    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    bars: list[bool] = field(default_factory=list)

    def judged(self, ratio: float, bar: float | None, *, at_most: bool = False) -> str:
        """A ratio as text, marked if it misses its bar."""
        met = bar is None or (ratio <= bar if at_most else ratio >= bar)
        self.bars += [met] if bar is not None else []
        return f"{ratio:.2f}{'' if met else ' !'}"

    @property
    def verdict(self) -> str:
        """How many bars are met; nothing where there are none."""
        return f"{sum(self.bars)} of {len(self.bars)} bars met; !: not met" if self.bars else ""

    def print(self, console: Console) -> None:
        """Show it on a terminal."""
        table = Table(*self.columns, box=None, pad_edge=False)
        for column in table.columns[1:]:
            column.justify = "right"
        for row in self.rows:
            table.add_row(*row)
        console.print(f"\n{self.title}", table, self.verdict)

    def markdown(self) -> list[str]:
        """Lines, the last one empty."""
        rows = [self.columns, ["---"] * len(self.columns), *self.rows]
        lines = [
            *([self.title, ""] if self.title else []),
            *(f"| {' | '.join(row)} |" for row in rows),
        ]
        return [*lines, "", *([self.verdict, ""] if self.bars else [])]
