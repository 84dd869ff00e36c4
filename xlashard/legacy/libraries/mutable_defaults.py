"""Dataclasses whose fields have unhashable defaults, such as arrays, as before Python 3.11."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from xlashard.legacy.entries.entry import Entry
from xlashard.legacy.libraries.frozen_dicts import find_importing_frame
from xlashard.legacy.module_shims import Listener, patch

MUTABLE_DEFAULTS = Entry(
    "dataclasses.dataclass(default)",
    "3.11",
    "works",
    "",
    "dataclasses.field(default_factory=...)",
    "fields may have unhashable defaults, such as arrays",
    library="Python",
)
"""Entry of unhashable defaults, for the report."""


def accept_mutable_defaults(listener: Listener) -> Callable[[], None]:
    """Let fields have every default but a list, a dictionary or a set.

    Python has no public hook for its check, and libraries of 2022 define such classes when they
    are imported.

    Args:
        listener: Called with `MUTABLE_DEFAULTS`, the default, and the frame of the class.

    Returns:
        A function that undoes it.
    """
    read_field: Any = vars(dataclasses).get("_get_field")
    if read_field is None:
        return lambda: None

    @functools.wraps(read_field)
    def read(cls: type, name: str, *rest: Any) -> Any:
        attribute = getattr(cls, name, dataclasses.MISSING)
        is_field = isinstance(attribute, dataclasses.Field)
        default = attribute.default if is_field else attribute
        if type(default).__hash__ is not None or isinstance(default, list | dict | set):
            return read_field(cls, name, *rest)
        stand_in: Any = attribute if is_field else dataclasses.field()
        stand_in.default = None
        setattr(cls, name, stand_in)
        try:
            result = read_field(cls, name, *rest)
        finally:
            setattr(cls, name, attribute)
        result.default = default
        listener(MUTABLE_DEFAULTS, default, find_importing_frame(dataclasses.__name__))
        return result

    return patch(dataclasses, "_get_field", read)
