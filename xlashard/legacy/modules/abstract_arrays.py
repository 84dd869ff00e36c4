"""`jax.abstract_arrays`."""

from xlashard._jax.compat.legacy_api import core, jaxprs
from xlashard.legacy.modules.core import raise_to_shaped
from xlashard.legacy.modules.entry import Entry, members

ShapedArray = core.ShapedArray
array_types = jaxprs.array_types

ENTRIES: tuple[Entry, ...] = (
    Entry("jax.abstract_arrays", "0.4.20", "works", __name__, "jax.core"),
    *members(
        "jax.abstract_arrays",
        "0.4.16",
        __name__,
        {
            "ShapedArray": "jax.core.ShapedArray",
            "raise_to_shaped": "aval",
        },
    ),
    *members(
        "jax.abstract_arrays",
        "0.4.20",
        __name__,
        {"array_types": "jax.extend.core.array_types"},
    ),
)
