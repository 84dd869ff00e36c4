"""Internals of JAX that programs of 2022 and 2023 use, at their current places."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

# JAX imports multihost_utils and pjit lazily. The legacy modules replace them in sys.modules, and
# need the originals loaded before.
import jax.core
import jax.experimental.multihost_utils
import jax.experimental.pjit
import jax.extend.backend
import jax.extend.core
import jax.extend.linear_util
import jax.extend.random
from jax._src import compilation_cache as inner_compilation_cache
from jax._src import config, dispatch, pjit
from jax._src import core as inner_core
from jax._src import linear_util as inner_functions
from jax._src import mesh as mesh_lib
from jax._src import pmap as pmap_module
from jax._src import random as inner_random
from jax._src import util as inner_util
from jax._src import xla_bridge as inner_bridge
from jax._src.array import ArrayImpl
from jax._src.compiler import get_compile_options
from jax._src.lib import _jax as inner_extension
from jax._src.lib import xla_client as inner_client
from jax._src.mesh import Mesh
from jax._src.random import prng as inner_prng

from xlashard._jax.runtime.global_state import hook_before
from xlashard._jax.runtime.tracebacks import short_tracebacks
from xlashard.errors import MeshError

# Whole modules: `xlashard.legacy.modules` lists the names that programs use.
core: Any = inner_core
jaxprs: Any = jax.extend.core
functions: Any = jax.extend.linear_util
linear_util: Any = inner_functions
util: Any = inner_util
xla_bridge: Any = inner_bridge
xla_client: Any = inner_client
xla_extension: Any = inner_extension
generators: Any = jax.extend.random
key_types: Any = inner_prng
random: Any = inner_random
compilation_cache: Any = inner_compilation_cache
backend: Any = jax.extend.backend
compile_options: Any = get_compile_options


def concrete_class(shown: type) -> Any:
    """Return the concrete class of a public class of JAX, for `jax.Array` that of handles."""
    return ArrayImpl if shown is jax.Array else shown


def call_when_set(flag: Any, callback: Callable[[], None]) -> Callable[[], None]:
    """Call a function each time a setting is assigned.

    Args:
        flag: The setting.
        callback: The function.

    Returns:
        A function that ends the calls.
    """
    before = flag._update_global_hook, flag._update_thread_local_hook

    def end() -> None:
        flag._update_global_hook, flag._update_thread_local_hook = before

    flag._update_global_hook, flag._update_thread_local_hook = (
        hook_before(hook, callback) for hook in before
    )
    return end


EMPTY_MESH: Mesh = mesh_lib.EMPTY_ENV.physical_mesh
"""The mesh without devices, which is in force outside of every `with mesh:` block."""


def stacked_meshes() -> tuple[Mesh, ...]:
    """Return the meshes of the enclosing `with` blocks, outermost first; the first may be empty."""
    return tuple(env.physical_mesh for env in mesh_lib.thread_resources.stack)


def set_context_mesh(mesh: Mesh) -> None:
    """Replace the mesh of this thread until the innermost `with mesh:` block ends.

    Args:
        mesh: The mesh; `EMPTY_MESH` for none.
    """
    resources = mesh_lib.thread_resources
    resources.stack[-1] = resources.env = mesh_lib.ResourceEnv(mesh)
    # This setting is part of the keys of JAX's caches.
    config.mesh_context_manager.set_local(tuple(m for m in stacked_meshes() if not m.empty))


class PlaceholderMesh(Mesh):
    """Mesh of placeholder objects in place of devices, which may be unhashable.

    JAX interns meshes by the hashes of their devices; placeholder meshes are compared instead. They
    serve to compute shard indices, and no program runs on them.

    Args:
        devices: The devices, an array of objects.
        axis_names: One name for each of its dimensions.
    """

    def __new__(cls, devices: Any, axis_names: tuple[str, ...]) -> "PlaceholderMesh":
        """Create a mesh without interning it."""
        held = devices.copy()
        held.flags.writeable = False
        self = object.__new__(cls)
        fields = {
            "devices": held,
            "axis_names": axis_names,
            "axis_types": (mesh_lib.AxisType.Auto,) * len(axis_names),
            "size": held.size,
            "_cached_device_list": None,
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        return self

    @property
    def abstract_mesh(self) -> Any:
        """Refuse to trace or place anything on this mesh.

        Raises:
            MeshError: Always.
        """
        raise MeshError(
            f"{self!r} consists of {type(self.devices.flat[0]).__name__}s instead of devices of "
            "JAX, and no program runs on it: build a mesh of jax.devices()"
        )

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Mesh)
            and self.axis_names == other.axis_names
            and self.devices.shape == other.devices.shape
            and all(a == b for a, b in zip(self.devices.flat, other.devices.flat, strict=True))
        )

    def __hash__(self) -> int:
        return hash((self.axis_names, self.devices.shape))

    def __reduce__(self) -> tuple[Any, ...]:
        return PlaceholderMesh, (self.devices, self.axis_names)

    def __repr__(self) -> str:
        return f"Mesh(axis_sizes={self.devices.shape}, axis_names={self.axis_names!r})"


def refuse_in_pmap(array_type: type, refuse: Callable[[Any], None]) -> None:
    """Make `jax.pmap` check every argument of a type before sharding it.

    `jax.pmap` accepts every object with a shape and a dtype, and has no hook for its class.

    Args:
        array_type: The class.
        refuse: Function of the argument, which raises.
    """
    size_of = pmap_module._mapped_axis_size

    @functools.wraps(size_of)
    def checked(args: Sequence[Any], in_axes: Any) -> Any:
        for arg in args:
            if isinstance(arg, array_type):
                with short_tracebacks:
                    refuse(arg)
        return size_of(args, in_axes)

    # Every call looks the function up by this name, also calls of functions wrapped before.
    pmap_module._mapped_axis_size = checked


pmap = pmap_module.pmap
"""JAX's own `pmap`, also while `jax.pmap` is replaced."""


class TopLevelComputation(NamedTuple):
    """A function that JAX is about to compile and run at the top level.

    Attributes:
        name: The name of the function.
        is_eager: True for an operation such as `jax.numpy.add`, False for a function that a program
            passed to `jax.jit`.
    """

    name: str
    is_eager: bool


_compile_and_run = pjit._pjit_call_impl_python


def watch_computations(check: Callable[[TopLevelComputation, Sequence[Any]], None] | None) -> None:
    """Call a function with each computation that JAX's dispatcher has not seen; None for no more.

    An exception of the function keeps the computation from running, and from being repeated by the
    dispatcher.
    """

    def checked(*args: Any, **parameters: Any) -> Any:
        name = parameters["name"]
        source = str(parameters["jaxpr"].debug_info.func_src_info)
        # JAX inlines most functions of jax.numpy, and runs primitives by a function of its own.
        inline = parameters["inline"]
        inlined = getattr(inline, "name", inline) in (True, "JAX_EARLY")
        is_eager = inlined or f" at {dispatch.__file__}:" in source
        assert check is not None
        check(TopLevelComputation(name, is_eager), args)
        return _compile_and_run(*args, **parameters)

    pjit._pjit_call_impl_python = _compile_and_run if check is None else checked
