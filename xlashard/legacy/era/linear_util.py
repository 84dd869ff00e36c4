"""`jax.linear_util`: functions with transformations put around them."""

from xlashard._jax.era import functions, linear_util

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
