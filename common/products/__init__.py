"""``x @ w.T`` in other ways than PyTorch's, for the layers that name one."""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

from common.products.fp32 import TensorCoreLinear

__all__ = ["TensorCoreLinear", "linear_of"]

PRODUCTS = {"torch": lambda: F.linear, "tensor cores": TensorCoreLinear}


def linear_of(products: str) -> Callable[..., Tensor]:
    """What computes ``x @ w.T + bias`` for one weight of a layer, called as ``torch.nn.functional.linear``.

    Args:
        products: "torch" for ``torch.nn.functional.linear`` itself, "tensor cores" for a :class:`TensorCoreLinear`.

    Raises:
        ValueError: ``products`` is neither.
    """
    if products not in PRODUCTS:
        names = " or ".join(map(repr, PRODUCTS))
        raise ValueError(f"products must be {names}; got {products!r}")
    return PRODUCTS[products]()
