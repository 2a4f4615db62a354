"""Task 4: FlashAttention-2 in CUDA."""

import common  # noqa: F401  (before torch: see there)
