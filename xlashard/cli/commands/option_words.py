"""Words of options as values of Python, and errors of Python as words of options."""

import argparse
from collections.abc import Sequence
from typing import Any

from xlashard.errors import ArgumentError, TopologyError, XlashardError
from xlashard.predict.costs.kernel_costs import read_kernel_cost_words
from xlashard.predict.preflight.report.pricing import parse_price
from xlashard.support.documents import parse_json


def command_line_message(error: XlashardError) -> str:
    """Return the message of an error, with command line arguments as the fix.

    Example:
        >>> from xlashard.errors import TopologyError
        >>> command_line_message(TopologyError("that is no mesh", axes={"data": 4, "model": 2}))
        'that is no mesh: write --mesh data=4,model=2'
    """
    if not isinstance(error, TopologyError):
        return str(error)
    if error.topology:
        return f"{error.problem}: write --topology {error.topology} --slices {error.slices}"
    if error.axes is None:
        return str(error)
    words = ",".join(f"{name}={size}" for name, size in error.axes.items())
    return f"{error.problem}: write --mesh {words}"


def read_mesh(text: str) -> dict[str, int]:
    """Parse the mesh axes of a command line.

    Raises:
        ArgumentError: If the text is invalid.

    Example:
        >>> read_mesh("data=8,model=4")
        {'data': 8, 'model': 4}
    """
    axes: dict[str, int] = {}
    for word in text.split(","):
        name, _, size = (part.strip() for part in word.partition("="))
        number = size.removeprefix("-")
        if not name.isidentifier() or not (number.isascii() and number.isdecimal()):
            raise ArgumentError(
                f"--mesh {text} is no list of axes and sizes ({word.strip()!r}): write --mesh "
                "data=8,model=4"
            )
        if name in axes:
            raise ArgumentError(f"--mesh {text} names the axis {name} twice")
        axes[name] = int(size)
    return axes


def read_options(words: Sequence[str]) -> dict[str, Any]:
    """Parse compiler options of a command line.

    Raises:
        ArgumentError: If one has no value.

    Example:
        >>> read_options(["xla_a=true", "xla_b=3", "xla_c=fast"])
        {'xla_a': True, 'xla_b': 3, 'xla_c': 'fast'}
    """
    options: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if not (name and equals):
            raise ArgumentError(f"--option {word} has no value: write --option {name}=true")
        try:
            options[name] = parse_json(value)
        except ValueError:
            options[name] = value
    return options


def preflight_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a preflight as keywords of `preflight`, checked.

    Args:
        arguments: The words of `xlashard preflight`, parsed.

    Raises:
        ArgumentError: If the price, the time of a kernel or an option of the compiler is invalid.
    """
    if arguments.price is not None:
        parse_price(arguments.price)
    return {
        "price": arguments.price,
        "compiler_options": read_options(arguments.option) or None,
        "estimate": arguments.estimate,
        "kernel_costs": read_kernel_cost_words(arguments.kernel_cost),
        "values": arguments.values,
    }
