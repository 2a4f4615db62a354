"""The device that tests run on, and marks for those that are not for every GPU."""

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HOPPER = DEVICE == "cuda" and torch.cuda.get_device_capability()[0] == 9
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
of_gpus_hopper = pytest.mark.skipif(
    DEVICE == "cuda" and not HOPPER, reason="of GPUs, needs a Hopper"
)
