"""Extension of griffe, which reads the docstrings for the API pages of the site."""

import re
from typing import Any

import griffe


class ExamplesAreCode(griffe.Extension):
    """Show the lines of an `Example:` section as code.

    Griffe does that for sections with the title `Examples:` only.
    """

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section of an object's docstring."""
        if obj.docstring is not None:
            value = obj.docstring.value
            obj.docstring.value = re.sub(r"(?m)^Example:$", "Examples:", value)
