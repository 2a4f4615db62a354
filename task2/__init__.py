"""Task 2: naive attention in CUDA."""

import common  # noqa: F401  (before torch: see there)
