"""Task 3: FlashAttention-2 in PyTorch."""

import common  # noqa: F401  (before torch: see there)
