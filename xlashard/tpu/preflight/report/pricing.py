"""What a program costs, by a price that the caller knows: no price of anybody's stands here."""

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
    """What a chip costs.

    Attributes:
        chip_hour: Of one chip for an hour.
        currency: As the caller wrote it; empty if they didn't.
    """

    chip_hour: float
    currency: str = ""


def parse_price(said: float | str) -> Price:
    """A price as a person writes it.

    Args:
        said: The price of one chip for an hour: `4.2`, `"4.20"`, `"4.20 USD"`, `"$4.20"`.

    Raises:
        ArgumentError: If it is no number, or none that a price can be.

    Example:
        >>> read_price("4.20 USD")
        Price(chip_hour=4.2, currency='USD')
    """
    if isinstance(said, str):
        found = _PRICE.fullmatch(said)
        if found is None or (found["before"] and found["after"]):
            raise ArgumentError(
                f"price={said!r} is no number: write what one chip costs for an hour, such as "
                "4.2 or '4.20 USD'"
            )
        amount = float(found["amount"].replace(",", ""))
        currency = found["before"] or found["after"] or ""
    elif isinstance(said, int | float) and not isinstance(said, bool):
        amount, currency = float(said), ""
    else:
        raise ArgumentError(
            f"price is a {type(said).__name__}, not a number: write what one chip costs for an "
            "hour, such as 4.2 or '4.20 USD'"
        )
    if not 0 <= amount < math.inf:
        raise ArgumentError(f"price={said!r}: a chip costs 0 or more for an hour")
    return Price(amount, currency)


def describe_price(
    price: Price, seconds: float, chips: int, workload: Workload | None
) -> PriceReport:
    """What one execution costs, and an hour, and 10⁹ tokens.

    Args:
        price: Of one chip.
        seconds: How long one execution takes.
        chips: How many chips are paid for.
        workload: What one execution does, where that is a step of training.
    """
    hour = price.chip_hour * chips
    step = hour * seconds / 3600
    billion = None if workload is None else step / workload.tokens * 1e9
    return PriceReport(price.chip_hour, price.currency, step, hour, billion)
