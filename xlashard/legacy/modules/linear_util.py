"""`jax.linear_util`."""

from xlashard._jax.legacy_api import functions, linear_util
from xlashard.legacy.modules.entry import Entry, members

Store = linear_util.Store
StoreException = functions.StoreException
WrappedFun = functions.WrappedFun
annotate = linear_util.annotate
cache = functions.cache
hashable_partial = linear_util.hashable_partial
merge_linear_aux = functions.merge_linear_aux
transformation = functions.transformation
transformation_with_aux = functions.transformation_with_aux
wrap_init = functions.wrap_init

ENTRIES: tuple[Entry, ...] = (
    Entry(
        "jax.linear_util",
        "0.4.24",
        "works",
        __name__,
        "import jax.extend.linear_util",
    ),
    *members(
        "jax.linear_util",
        "0.4.24",
        __name__,
        {
            "StoreException": "jax.extend.linear_util.StoreException",
            "WrappedFun": "jax.extend.linear_util.WrappedFun",
            "cache": "jax.extend.linear_util.cache",
            "merge_linear_aux": "jax.extend.linear_util.merge_linear_aux",
            "transformation": "jax.extend.linear_util.transformation2",
            "transformation_with_aux": "jax.extend.linear_util.transformation_with_aux2",
            "wrap_init": "jax.extend.linear_util.wrap_init",
        },
    ),
)
