"""Task 5: KV cache and decode."""

import common  # noqa: F401  (before torch: see there)
