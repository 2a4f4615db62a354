"""A bar that says what runs now, on a terminal; nothing where the output goes to a file."""

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def progress(console: Console | None = None) -> Progress:
    """A bar for ``with``, which disappears at the end; lines printed meanwhile appear above it."""
    return Progress(
        TextColumn("  {task.description}", markup=False),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not sys.stdout.isatty(),
    )
