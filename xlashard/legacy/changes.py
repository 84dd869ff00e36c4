"""Changes of attributes and dictionaries that can be taken back."""

from dataclasses import dataclass
from typing import Any

LACKING: Any = object()
"""What stands for a value where there is none."""


@dataclass(frozen=True)
class Change:
    """One attribute, or one entry of a dictionary, that was changed.

    Attributes:
        holder: The dictionary, or what has the attribute.
        name: The key or the attribute.
        old: What was there before; `LACKING` if nothing was.
        new: What is there now; `LACKING` if it was removed.

    Example:
        >>> ages = {"Ada": 36}
        >>> change = Change.make(ages, "Ada", 37)
        >>> change.undo()
        >>> ages
        {'Ada': 36}
    """

    holder: Any
    name: str
    old: Any
    new: Any

    @classmethod
    def make(cls, holder: Any, name: str, new: Any) -> "Change":
        """Makes a change, and remembers it."""
        change = cls(holder, name, _get(holder, name), new)
        _set(holder, name, new)
        return change

    def undo(self) -> None:
        """Takes it back, unless somebody else has changed it since."""
        if _get(self.holder, self.name) is self.new:
            _set(self.holder, self.name, self.old)


def _get(holder: Any, name: str) -> Any:
    return (holder if isinstance(holder, dict) else vars(holder)).get(name, LACKING)


def _set(holder: Any, name: str, value: Any) -> None:
    if isinstance(holder, dict):
        if value is LACKING:
            holder.pop(name, None)
        else:
            holder[name] = value
    elif value is LACKING:
        delattr(holder, name)
    else:
        setattr(holder, name, value)
