"""Names of a package whose modules are imported when somebody asks for them.

A program that never asks for a report should not wait for what draws it: the modules behind these
names take as long to import as all others together.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def on_demand(
    package: str, members: dict[str, Any], homes: Mapping[str, tuple[str, ...]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a package.

    Args:
        package: Its name.
        members: What it has already; what is imported is kept there.
        homes: By module the names that come from it. A module of the package itself may stand for
            its own name.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def member(name: str) -> Any:
        home = home_of.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name)
        module = importlib.import_module(home)
        value = members[name] = module if home == f"{package}.{name}" else getattr(module, name)
        return value

    def listing() -> list[str]:
        return sorted({*members, *home_of})

    return member, listing
