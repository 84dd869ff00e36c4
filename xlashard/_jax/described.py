"""Programs of devices that only compile, as they come out of a file.

PJRT loads an executable onto devices, and devices of a topology can hold none. What the compiler
said of the program is kept beside its bytes, and answers in its place.
"""

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from jaxlib import _jax as jaxlib_module

from xlashard._jax.compiling import Executable


@dataclass(frozen=True)
class _Text:
    """An HLO module of which only the text is left."""

    text: str

    def to_string(self) -> str:
        return self.text


@dataclass(frozen=True, eq=False)
class Described:
    """Answers what PJRT's executable would, of a program that can't be loaded here.

    Attributes:
        modules: The optimised HLO, module by module.
        cost: XLA's estimates.
        memory: Bytes per device, by PJRT's names; None where it didn't say.
        layouts: Those of parameters and of results, as text.
        memory_kinds: Of each result.
    """

    modules: tuple[str, ...]
    cost: Mapping[str, float]
    memory: Mapping[str, int] | None
    layouts: tuple[tuple[str, ...], tuple[str, ...]]
    memory_kinds: tuple[str, ...]

    def hlo_modules(self) -> list[_Text]:
        return [_Text(text) for text in self.modules]

    def cost_analysis(self) -> dict[str, float]:
        return dict(self.cost)

    def get_compiled_memory_stats(self) -> SimpleNamespace | None:
        return None if self.memory is None else SimpleNamespace(**self.memory)

    def get_parameter_layouts(self) -> list[Any]:
        return [_layout(text) for text in self.layouts[0]]

    def get_output_layouts(self) -> list[Any]:
        return [_layout(text) for text in self.layouts[1]]

    def get_output_memory_kinds(self) -> list[list[str]]:
        return [list(self.memory_kinds)]


def _layout(text: str) -> Any:
    layout = jaxlib_module.PjRtLayout.__new__(jaxlib_module.PjRtLayout)
    layout.__setstate__((text.encode(),))
    return layout


def describe(executable: Executable) -> bytes:
    """What a compiled program says of itself, as bytes."""
    memory = _if_said(executable.get_compiled_memory_stats)
    cost = _if_said(executable.cost_analysis)
    said = {
        "modules": [module.to_string() for module in executable.hlo_modules()],
        "cost": dict(cost[0] if isinstance(cost, list | tuple) else cost or {}),
        "memory": None if memory is None else _numbers(memory),
        "layouts": [
            [str(layout) for layout in executable.get_parameter_layouts()],
            [str(layout) for layout in executable.get_output_layouts()],
        ],
        "memory_kinds": list(executable.get_output_memory_kinds()[0]),
    }
    return zlib.compress(json.dumps(said).encode())


def _if_said(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except RuntimeError:  # not every compiler answers before its program is loaded
        return None


def _numbers(stats: Any) -> dict[str, int]:
    found = {name: getattr(stats, name) for name in dir(stats) if not name.startswith("_")}
    return {name: value for name, value in found.items() if type(value) is int}


def described(data: bytes | memoryview) -> Described:
    """The program that `describe` has described.

    Raises:
        ValueError: If the bytes are none of such.
    """
    try:
        said = json.loads(zlib.decompress(data))
    except zlib.error as error:
        raise ValueError(str(error)) from None  # no-catalogue: needs a damaged file
    ins, outs = (tuple(map(str, side)) for side in said["layouts"])
    memory = said["memory"]
    return Described(
        modules=tuple(map(str, said["modules"])),
        cost={str(name): float(value) for name, value in said["cost"].items()},
        memory=None if memory is None else {str(n): int(value) for n, value in memory.items()},
        layouts=(ins, outs),
        memory_kinds=tuple(map(str, said["memory_kinds"])),
    )
