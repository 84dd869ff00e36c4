"""Cost of a program at the caller's price per chip-hour."""

import math
import re
from dataclasses import dataclass

from xlashard.errors import ArgumentError

_NUMBER = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
_CURRENCY = r"[^\s\d.,+-]{1,8}"
_PRICE = re.compile(
    rf"\s*(?P<before>{_CURRENCY})?\s*(?P<amount>{_NUMBER})\s*(?P<after>{_CURRENCY})?\s*"
)


@dataclass(frozen=True)
class Price:
    """Price of a chip-hour.

    Attributes:
        chip_hour: Cost of one chip for an hour.
        currency: Currency as entered; may be empty.
    """

    chip_hour: float
    currency: str = ""


@dataclass(frozen=True)
class Workload:
    """Workload of a training step.

    Attributes:
        tokens: Tokens per step, over all devices.
        model_flops: Model FLOP per step, over all devices.
        parameters: Number of parameters.
        active_parameters: Number of parameters used per token.
    """

    tokens: int
    model_flops: float
    parameters: int
    active_parameters: int


@dataclass(frozen=True)
class ThroughputReport:
    """Throughput of a training step, by the time estimate.

    Attributes:
        workload: Workload of a step.
        tokens_per_second: Tokens per second over all devices.
        utilisation: Model FLOP utilisation (MFU), from 0 to 1: the share of `peak_flops`.
        device_tokens_per_second: Tokens per second on each device.
        peak_flops: Peak FLOP per second of a device, by `peak_dtype`.
        peak_dtype: Dtype of the peak.
    """

    workload: Workload
    tokens_per_second: float
    utilisation: float
    device_tokens_per_second: float
    peak_flops: float
    peak_dtype: str = "bfloat16"


@dataclass(frozen=True)
class PriceReport:
    """Cost at the caller's price.

    Attributes:
        chip_hour: Price of a chip-hour.
        currency: Currency as entered; may be empty.
        step: Cost of one execution on all chips.
        hour: Cost of an hour of all chips.
        billion_tokens: Cost of 10⁹ tokens; None without a workload.
    """

    chip_hour: float
    currency: str
    step: float
    hour: float
    billion_tokens: float | None

    @property
    def million_tokens(self) -> float | None:
        """Cost of 10⁶ tokens; None without a workload."""
        return None if self.billion_tokens is None else self.billion_tokens / 1000

    def format_amount(self, amount: float) -> str:
        """Format an amount in the currency, with two digits or more."""
        digits = ",.2f" if amount >= 0.1 or amount == 0 else ".2g" if amount >= 1e-4 else ".1e"
        return f"{amount:{digits}} {self.currency}".rstrip()


def parse_price(value: float | str) -> Price:
    """Parse a price.

    Args:
        value: Cost per chip-hour: `4.2`, `"4.20"`, `"4.20 USD"`, `"$4.20"`.

    Raises:
        ArgumentError: If the price is invalid.

    Example:
        >>> parse_price("4.20 USD")
        Price(chip_hour=4.2, currency='USD')
    """
    if isinstance(value, str):
        match = _PRICE.fullmatch(value)
        if match is None or (match["before"] and match["after"]):
            raise ArgumentError(
                f"price={value!r} is invalid: expected the cost per chip-hour, such as "
                "4.2 or '4.20 USD'"
            )
        amount = float(match["amount"].replace(",", ""))
        currency = match["before"] or match["after"] or ""
    elif isinstance(value, int | float) and not isinstance(value, bool):
        amount, currency = float(value), ""
    else:
        raise ArgumentError(
            f"price is a {type(value).__name__}: expected the cost per chip-hour, such as 4.2 or "
            f"'4.20 USD'"
        )
    if not 0 <= amount < math.inf:
        raise ArgumentError(
            f"price={value!r} is invalid: expected a finite cost per chip-hour of 0 or more"
        )
    return Price(amount, currency)


def describe_price(price: Price, seconds: float, chips: int, tokens: float | None) -> PriceReport:
    """Return the cost of one execution, of an hour, and of 10⁹ tokens.

    Args:
        price: Price of a chip-hour.
        seconds: Time of one execution.
        chips: Number of chips.
        tokens: Tokens of one execution, if it is a training step.
    """
    hour = price.chip_hour * chips
    step = hour * seconds / 3600
    billion = step / tokens * 1e9 if tokens else None
    return PriceReport(price.chip_hour, price.currency, step, hour, billion)
