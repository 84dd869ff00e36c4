"""Products and convolutions of many kinds, and how many multiplications each takes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Product:
    """A bilinear function of two arrays.

    Attributes:
        name: Name of the case.
        function: The product.
        left: The shape of its first operand.
        right: The shape of its second operand.
    """

    name: str
    function: Callable[[Any, Any], Any]
    left: tuple[int, ...]
    right: tuple[int, ...]

    def multiplications(self) -> float:
        """Return the number of multiplications: the sum of the product of ones."""
        ones = np.ones(self.left, np.float32), np.ones(self.right, np.float32)
        with jax.default_device(jax.devices("cpu")[0]):
            return float(np.sum(np.asarray(self.function(*ones), np.float64)))


def _einsum(formula: str, left: tuple[int, ...], right: tuple[int, ...]) -> Product:
    name = formula.replace(",", "_").replace("->", "_to_")
    return Product(name, lambda x, y: jnp.einsum(formula, x, y), left, right)


def _convolution(
    name: str, left: tuple[int, ...], right: tuple[int, ...], strides: Any, **how: Any
) -> Product:
    how = {"padding": "SAME", **how}
    layout = {3: ("NHC", "HIO", "NHC"), 4: ("NHWC", "HWIO", "NHWC")}[len(left)]
    return Product(
        name,
        lambda x, y: jax.lax.conv_general_dilated(x, y, strides, dimension_numbers=layout, **how),
        left,
        right,
    )


PRODUCTS = (
    _einsum("ik,kj->ij", (256, 512), (512, 384)),
    _einsum("ki,kj->ij", (512, 256), (512, 384)),
    _einsum("ik,jk->ji", (256, 512), (384, 512)),
    _einsum("bik,bkj->bij", (6, 128, 256), (6, 256, 128)),
    _einsum("bshk,bthk->bhst", (2, 256, 4, 128), (2, 256, 4, 128)),
    _einsum("bhst,bthk->bshk", (2, 4, 256, 256), (2, 256, 4, 128)),
    _einsum("bsd,dhk->bshk", (2, 256, 256), (256, 4, 128)),
    _einsum("bshk,hkd->bsd", (2, 256, 4, 128), (4, 128, 256)),
    _einsum("bsd,bsf->df", (2, 256, 256), (2, 256, 512)),
    _einsum("bsd,bshk->dhk", (2, 256, 256), (2, 256, 4, 128)),
    _einsum("abc,bcd->da", (8, 16, 128), (16, 128, 256)),
    _einsum("ebcm,emh->ebch", (4, 2, 128, 256), (4, 256, 256)),
    _convolution("conv3x3", (64, 16, 16, 128), (3, 3, 128, 256), (1, 1)),
    _convolution("conv_strided", (64, 16, 16, 128), (3, 3, 128, 128), (2, 2)),
    _convolution("conv_valid", (64, 17, 15, 128), (5, 3, 128, 128), (1, 2), padding="VALID"),
    _convolution("conv_dilated", (64, 16, 16, 128), (3, 3, 128, 128), (1, 1), rhs_dilation=(2, 2)),
    _convolution(
        "conv_transposed",
        (64, 8, 8, 128),
        (3, 3, 128, 128),
        (1, 1),
        lhs_dilation=(2, 2),
        padding=((1, 2), (1, 2)),
    ),
    _convolution("conv_grouped", (64, 8, 8, 256), (3, 3, 64, 256), (1, 1), feature_group_count=4),
    _convolution(
        "conv_batch_grouped", (8, 16, 16, 128), (3, 3, 128, 256), (1, 1), batch_group_count=2
    ),
    _convolution("conv1d", (64, 64, 128), (7, 128, 256), (1,)),
)
"""All large enough for the matrix unit; smaller ones become sums of element-wise products."""
