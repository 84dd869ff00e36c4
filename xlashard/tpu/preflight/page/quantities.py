"""Seconds, rates and money as people read them."""

from xlashard.wording import in_bytes


def in_seconds(seconds: float) -> str:
    """A duration of three digits: `128 ms`, `4.05 µs`."""
    if seconds <= 0:
        return "0"
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= 0.9995 * size:
            return f"{three_digits(seconds / size)} {unit}"
    return f"{three_digits(seconds * 1e9)} ns"


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
    """A price of three digits at least: `0.0123 USD`, `1,234.50 USD`."""
    decimals = 2
    while decimals < 8 and 0 < abs(amount) < 10 ** (2 - decimals):
        decimals += 1
    return f"{amount:,.{decimals}f} {currency}".rstrip()


def in_percent(share: float) -> str:
    """A share of one: `42.7%`."""
    return f"{share:.1%}" if share < 9.995 else f"{share:,.0%}"


def signed_bytes(count: float) -> str:
    """Bytes more or less: `+1.5 GiB`, `−3 B`."""
    return f"{'−' if count < 0 else '+'}{in_bytes(abs(count))}"
