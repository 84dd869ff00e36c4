"""The functions of `jax.numpy.fft` for Arrays; see `xlashard.numpy`."""

import typing as _typing

import jax.numpy.fft as _jnp

if _typing.TYPE_CHECKING:
    from jax.numpy.fft import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]

from xlashard.numpy._namespace import Namespace as _Namespace

_names = _Namespace(_jnp, __name__, globals())
if not _typing.TYPE_CHECKING:
    # Type checkers read the names above and report missing ones.
    __getattr__ = _names.get
__dir__ = _names.listing
