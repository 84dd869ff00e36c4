"""What programs of 2022 and 2023 reach for inside of JAX, where it is there today."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

# Each of these two is imported by JAX only when it is asked for. The era's modules stand in place
# of them, and need them loaded before.
import jax.core
import jax.experimental.multihost_utils
import jax.experimental.pjit
import jax.extend.backend
import jax.extend.core
import jax.extend.linear_util
import jax.extend.random
from jax._src import compilation_cache as inner_compilation_cache
from jax._src import config
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

from xlashard._jax.runtime.tracebacks import short_tracebacks
from xlashard.errors import MeshError

# Modules, and not their names one by one: what a program reaches for is listed where it does so.
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
    """The class whose instances JAX gives out for one that it shows: of arrays, that of handles."""
    return ArrayImpl if shown is jax.Array else shown


def call_when_set(flag: Any, told: Callable[[], None]) -> Callable[[], None]:
    """Calls a function each time that a setting is given a value.

    Args:
        flag: The setting.
        told: The function.

    Returns:
        Ends that.
    """
    before = flag._update_global_hook, flag._update_thread_local_hook

    def then(hook: Callable[[Any], None] | None) -> Callable[[Any], None]:
        def both(value: Any) -> None:
            if hook is not None:
                hook(value)
            told()

        return both

    def end() -> None:
        flag._update_global_hook, flag._update_thread_local_hook = before

    flag._update_global_hook, flag._update_thread_local_hook = map(then, before)
    return end


EMPTY_MESH: Mesh = mesh_lib.EMPTY_ENV.physical_mesh
"""The mesh without devices, which stands where none is in force."""


def stacked_meshes() -> tuple[Mesh, ...]:
    """The meshes of the `with` blocks around here, outermost first; the first one may be empty."""
    return tuple(env.physical_mesh for env in mesh_lib.thread_resources.stack)


def set_context_mesh(mesh: Mesh) -> None:
    """Puts another mesh in force in this thread, until the innermost `with mesh:` block ends.

    Args:
        mesh: The mesh; the empty one for none.
    """
    resources = mesh_lib.thread_resources
    resources.stack[-1] = resources.env = mesh_lib.ResourceEnv(mesh)
    # What JAX's caches tell programs apart by.
    config.mesh_context_manager.set_local(tuple(m for m in stacked_meshes() if not m.empty))


class PlaceholderMesh(Mesh):
    """A mesh of objects that stand for devices, and may have no hash, which JAX's own must have.

    JAX finds equal meshes by their devices' hashes and makes them one; these are compared instead.
    They are for asking where things would lie, and nothing can be computed on them.

    Args:
        devices: The devices, an array of objects.
        axis_names: One name for each of its dimensions.
    """

    def __new__(cls, devices: Any, axis_names: tuple[str, ...]) -> "PlaceholderMesh":
        """A mesh past JAX's table of them."""
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
        """What JAX asks of a mesh before it traces or places anything.

        Raises:
            MeshError: Always.
        """
        raise MeshError(
            f"{self!r} stands on {type(self.devices.flat[0]).__name__}s, which are no devices of "
            "JAX: nothing can be computed on it; build one of jax.devices()"
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
    """Makes `jax.pmap` ask about every argument of a type before it deals it out.

    It makes a program for all that looks like an array, and asks no class what it thinks of that.

    Args:
        array_type: The class.
        refuse: Is given the argument, and raises.
    """
    size_of = pmap_module._mapped_axis_size

    @functools.wraps(size_of)
    def checked(args: Sequence[Any], in_axes: Any) -> Any:
        for arg in args:
            if isinstance(arg, array_type):
                with short_tracebacks:
                    refuse(arg)
        return size_of(args, in_axes)

    # By this name every call looks it up, also of functions that were wrapped earlier.
    pmap_module._mapped_axis_size = checked


pmap = pmap_module.pmap
"""JAX's own, also where another one stands under its name."""
