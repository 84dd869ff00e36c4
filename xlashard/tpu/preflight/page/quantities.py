"""Rates, shares and money as people read them."""

from xlashard.tpu.preflight.words import money_text


def three_digits(number: float) -> str:
    """A number with three digits, or more where it is larger: `4.05`, `128`, `12,300`."""
    if abs(number) >= 99.95:
        return f"{number:,.0f}"
    return f"{number:.1f}" if abs(number) >= 9.995 else f"{number:.2f}"


def in_thousands(number: float) -> str:
    """A large number: `1.23 M`."""
    for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * size:
            return f"{three_digits(number / size)} {unit}"
    return three_digits(number)


def in_money(amount: float, currency: str) -> str:
    """A price with its currency: `0.089 USD`, `1,234.50 USD`."""
    return f"{money_text(amount)} {currency}".rstrip()


def many(number: int, noun: str, plural: str = "") -> str:
    """A number of things: `1 leaf`, `8,960 chips`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
