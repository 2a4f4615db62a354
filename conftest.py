# BEGIN STAFF
import os

import common  # noqa: F401  (before torch: see there)

# isort: split
import torch

if not torch.cuda.is_available():  # Triton reads it when it is imported, which torch.compile does
    os.environ.setdefault("TRITON_INTERPRET", "1")
# END STAFF
pytest_plugins = ["common.check.pytest_plugin"]
