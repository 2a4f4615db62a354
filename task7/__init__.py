"""Task 7: GPT-2 through Hugging Face."""

import common  # noqa: F401  (before torch: see there)
