"""How dtypes are written in messages, tables and records."""

import torch


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for torch.float32."""
    return str(dtype).removeprefix("torch.")
