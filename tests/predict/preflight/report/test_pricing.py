"""Parsing of prices."""

import re

import pytest

from xlashard.errors import ArgumentError
from xlashard.predict.preflight.report.pricing import Price, Workload, describe_price, parse_price


@pytest.mark.parametrize(
    ("expected", "read"),
    [
        (4.2, Price(4.2)),
        (4, Price(4.0)),
        (0, Price(0.0)),
        ("4.20", Price(4.2)),
        (" 4.20 USD ", Price(4.2, "USD")),
        ("4.2EUR", Price(4.2, "EUR")),
        ("$4.20", Price(4.2, "$")),
        ("CHF 4", Price(4.0, "CHF")),
        (".5€", Price(0.5, "€")),
        ("1,234.5", Price(1234.5)),
        ("4e-1", Price(0.4)),
    ],
)
def test_price_is_parsed(expected: float | str, read: Price) -> None:
    assert parse_price(expected) == read


@pytest.mark.parametrize(
    ("expected", "fact"),
    [
        ("cheap", "price='cheap' is invalid"),
        ("", "price='' is invalid"),
        ("4,20", "price='4,20' is invalid"),
        ("4.2.0", "is invalid: expected the cost per chip-hour"),
        ("$4.20 USD", "is invalid: expected the cost per chip-hour"),
        ("-4", "is invalid: expected the cost per chip-hour"),
        ("nan", "is invalid: expected the cost per chip-hour"),
        (-4, "price=-4 is invalid: expected a finite cost"),
        (float("nan"), "price=nan is invalid: expected a finite cost"),
        (float("inf"), "price=inf is invalid: expected a finite cost"),
        ("1e999", "price='1e999' is invalid: expected a finite cost"),
        (True, "price is a bool"),
        ([4.2], "price is a list"),
    ],
)
def test_invalid_prices_are_refused(expected: object, fact: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(fact)):
        parse_price(expected)  # pyright: ignore[reportArgumentType]


def test_price_of_a_step_hour_and_billion_tokens() -> None:
    step = Workload(tokens=1_000_000, model_flops=1e15, parameters=10**9, active_parameters=10**9)
    found = describe_price(Price(3.6, "USD"), seconds=2.0, chips=100, tokens=step.tokens)
    assert (found.chip_hour, found.currency) == (3.6, "USD")
    assert found.hour == pytest.approx(360)
    assert found.step == pytest.approx(0.2)
    assert found.billion_tokens == pytest.approx(200)
    assert describe_price(Price(3.6), 2.0, 100, None).billion_tokens is None
