"""The functions of `jax.numpy` for Arrays, on the devices of their arguments.

A function is created at its first use. It takes whatever its namesake in `jax.numpy` takes, and
returns an `Array` where the namesake returns a `jax.Array`. Under `jit`, `pjit`, `grad` and `vmap`
it computes with tracers like its namesake.

Example:
    >>> import jax, numpy as np
    >>> import xlashard.numpy as xnp
    >>> from xlashard import Mesh, NamedSharding, P
    >>> mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    >>> x = xnp.arange(4.0, device=NamedSharding(mesh, P("data")))
    >>> xnp.where(x > 1, x, 0)
    Array([0., 0., 2., 3.], dtype=float32)
"""

import typing as _typing

import jax.numpy as _jnp

if _typing.TYPE_CHECKING:
    from jax.numpy import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]

    # Only a stub.
    from xlashard.numpy._typed import *  # noqa: F403  # pyright: ignore[reportMissingModuleSource]

from xlashard.core.array import Array as ndarray  # noqa: F401
from xlashard.core.array.dlpack import from_dlpack as from_dlpack
from xlashard.numpy import fft as fft
from xlashard.numpy import linalg as linalg
from xlashard.numpy._namespace import Indexed as _Indexed
from xlashard.numpy._namespace import Namespace as _Namespace
from xlashard.numpy._namespace import frompyfunc, ufunc, vectorize  # noqa: F401

r_, c_, mgrid, ogrid = map(_Indexed, (_jnp.r_, _jnp.c_, _jnp.mgrid, _jnp.ogrid))

_names = _Namespace(_jnp, __name__, globals())
if not _typing.TYPE_CHECKING:
    # Type checkers read the names above and report missing ones.
    __getattr__ = _names.get
__dir__ = _names.listing
