"""Costs of kernels that the caller of a preflight gives."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from xlashard.errors import ArgumentError
from xlashard.hlo.shapes import DTYPE_NAMES
from xlashard.support.documents import read_toml
from xlashard.support.formatting import parse_amount
from xlashard.support.tracebacks import short_tracebacks

_AMOUNTS = ("seconds", "flops", "transcendentals", "vector_ops", "hbm_bytes")
_KEYS = "seconds, flops, dtype, transcendentals, vector_ops and hbm_bytes"


@dataclass(frozen=True)
class KernelCost:
    """Cost of one run of a kernel on one device, as its caller knows it.

    Attributes:
        seconds: Measured time; None to compute it from the other figures.
        flops: FLOP of matrix products; a multiply-add counts as two.
        dtype: Operand dtype of the products.
        transcendentals: Elements of functions such as exp.
        vector_ops: Elements of other arithmetic.
        hbm_bytes: Bytes read and written in HBM.

    Raises:
        ArgumentError: A figure is negative or no number, or all are missing.

    Example:
        >>> KernelCost(flops=4.6e9, hbm_bytes=38e6).dtype
        'bfloat16'
    """

    seconds: float | None = None
    flops: float = 0.0
    dtype: str = "bfloat16"
    transcendentals: float = 0.0
    vector_ops: float = 0.0
    hbm_bytes: float = 0.0

    def __post_init__(self) -> None:
        with short_tracebacks:
            _check_dtype(self.dtype)
            for name in _AMOUNTS:
                value = getattr(self, name)
                if not _is_amount(value) and (name, value) != ("seconds", None):
                    raise ArgumentError(
                        f"{name}={value!r} is invalid: expected a number of 0 or more"
                    )
            if self.seconds is None and not any(getattr(self, name) for name in _AMOUNTS):
                raise ArgumentError(
                    "KernelCost has no figure: write KernelCost(seconds=1.2e-3), or "
                    "KernelCost(flops=4.6e9, hbm_bytes=38e6)"
                )


type KernelCosts = Mapping[str, float | KernelCost | Mapping[str, Any]]
"""Costs by kernel name: seconds, a `KernelCost`, or its fields."""


def read_kernel_costs(costs: KernelCosts | None) -> dict[str, KernelCost]:
    """Return the costs of kernels by name.

    Args:
        costs: Seconds or costs by name: `{"splash_mha_fwd": 1.2e-3}`.

    Raises:
        ArgumentError: A name or a cost is invalid.

    Example:
        >>> read_kernel_costs({"splash_mha_fwd": 1.2e-3})["splash_mha_fwd"].seconds
        0.0012
    """
    with short_tracebacks:
        if costs is None:
            return {}
        if not isinstance(costs, Mapping):
            raise ArgumentError(
                f"kernel_costs={costs!r} is invalid: expected costs by kernel name, such as "
                "{'splash_mha_fwd': 1.2e-3}"
            )
        return {_checked_name(name): _cost(name, value) for name, value in costs.items()}


def read_kernel_cost_words(words: Iterable[str]) -> dict[str, KernelCost]:
    """Parse the costs of kernels on a command line.

    Args:
        words: Each `NAME=TIME`, in seconds or as `1.2ms`; or a TOML file that has seconds by name,
            or a table with the fields of `KernelCost`.

    Raises:
        ArgumentError: A word or a file is invalid.

    Example:
        >>> {n: c.seconds for n, c in read_kernel_cost_words(["fwd=1.2ms", "bwd=0.003"]).items()}
        {'fwd': 0.0012, 'bwd': 0.003}
    """
    costs: dict[str, KernelCost] = {}
    with short_tracebacks:
        for word in words:
            costs |= _read_file(word) if word.endswith(".toml") else _read_word(word)
    return costs


def _read_word(word: str) -> dict[str, KernelCost]:
    # The names of some kernels have `=` in them.
    name, equals, text = word.rpartition("=")
    seconds = parse_amount(text, "seconds", plain=True)
    if not equals or seconds is None:
        raise ArgumentError(
            f"--kernel-cost {word} is invalid: expected NAME=TIME, such as "
            f"{name or text or 'splash_mha_fwd'}=1.2ms, or a TOML file"
        )
    return {_checked_name(name.strip()): KernelCost(seconds=seconds)}


def _read_file(path: str) -> dict[str, KernelCost]:
    try:
        costs = read_toml(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ArgumentError(f"--kernel-cost {path} can't be read: {reason}") from None
    try:
        return read_kernel_costs(costs)
    except ArgumentError as error:
        # no-catalogue: `read_kernel_costs` raises the error, and this adds the file
        raise ArgumentError(f"--kernel-cost {path}: {error}") from None


def _checked_name(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise ArgumentError(
            f"kernel_costs[{name!r}] is invalid: expected the name of a kernel as the report shows "
            "it, such as 'splash_mha_fwd'"
        )
    return name


def _check_dtype(name: Any) -> None:
    if not isinstance(name, str) or name not in DTYPE_NAMES:
        raise ArgumentError(
            f"dtype={name!r} is invalid: expected the dtype that the kernel multiplies, such as "
            "'bfloat16'"
        )


def _is_amount(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and value >= 0


def _cost(name: str, value: Any) -> KernelCost:
    path = f"kernel_costs[{name!r}]"
    if isinstance(value, KernelCost):
        return value
    if _is_amount(value):
        return KernelCost(seconds=float(value))
    if not isinstance(value, Mapping):
        raise ArgumentError(
            f"{path}={value!r} is invalid: expected seconds of 0 or more, such as 1.2e-3, or "
            "KernelCost(flops=4.6e9, hbm_bytes=38e6)"
        )
    strange = [key for key in value if key not in KernelCost.__dataclass_fields__]
    if strange:
        raise ArgumentError(f"{path} has no {strange[0]!r}: its keys are {_KEYS}")
    try:
        return KernelCost(**value)
    except ArgumentError as error:
        raise ArgumentError(f"{path}: {error}") from None
