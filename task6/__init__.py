"""Task 6: a dummy LLM."""

import common  # noqa: F401  (before torch: see there)
