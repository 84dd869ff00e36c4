"""Cost of a program at the caller's price per chip-hour."""

import math
import re
from dataclasses import dataclass

from xlashard.errors import ArgumentError
from xlashard.tpu.preflight.report.preflight_model import PriceReport, Workload

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
        found = _PRICE.fullmatch(value)
        if found is None or (found["before"] and found["after"]):
            raise ArgumentError(
                f"price={value!r} is invalid: expected the cost per chip-hour, such as "
                "4.2 or '4.20 USD'"
            )
        amount = float(found["amount"].replace(",", ""))
        currency = found["before"] or found["after"] or ""
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


def describe_price(
    price: Price, seconds: float, chips: int, workload: Workload | None
) -> PriceReport:
    """Return the cost of one execution, of an hour, and of 10⁹ tokens.

    Args:
        price: Price of a chip-hour.
        seconds: Time of one execution.
        chips: Number of chips.
        workload: Workload of one execution, if it is a training step.
    """
    hour = price.chip_hour * chips
    step = hour * seconds / 3600
    billion = None if workload is None else step / workload.tokens * 1e9
    return PriceReport(price.chip_hour, price.currency, step, hour, billion)
