"""Task 1: naive multi-head attention in PyTorch."""

import common  # noqa: F401  (before torch: see there)
