"""The function `pjit`, with its module of reports as an attribute: `xlashard.pjit.report`."""

import sys

from xlashard.core.pjit.api import pjit

# Python binds `xlashard.pjit` to what `sys.modules` has under that name once a module below it is
# imported, and there users expect the function.
vars(pjit)["__path__"] = __path__
vars(pjit)["__spec__"] = __spec__
sys.modules[__name__] = pjit  # pyright: ignore[reportArgumentType]
