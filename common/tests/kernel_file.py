"""A file of kernels for tests: its enums, and the lines that it marks with `// @tag`."""

import re
from pathlib import Path

FOLDER = Path(__file__).parent / "kernels"


class KernelFile:
    """A file of common/tests/kernels.

    Attributes:
        text: what is in it.
    """

    def __init__(self, name: str) -> None:
        self.name, self.text = name, (FOLDER / name).read_text()

    def names(self, enum: str) -> list[str]:
        """Of an enum's values."""
        found = re.search(rf"enum {enum} \{{(.*?)\}}", self.text, re.DOTALL)
        return found[1].replace(",", " ").split()

    def line_of(self, tag: str) -> str:
        """The one line that ends in the tag, as errors name it."""
        lines = [
            i for i, line in enumerate(self.text.splitlines(), 1) if line.endswith(f"// @{tag}")
        ]
        assert len(lines) == 1, f"@{tag} marks {len(lines)} lines"
        return f"common/tests/kernels/{self.name}:{lines[0]}"
