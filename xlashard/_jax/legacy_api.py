"""Internals of JAX that programs of 2022 and 2023 use, at their current places."""

import functools
from collections.abc import Callable, Sequence
from itertools import takewhile
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

# JAX imports multihost_utils and pjit lazily. The legacy modules replace them in sys.modules, and
# need the originals loaded before.
import jax.core
import jax.experimental.multihost_utils
import jax.experimental.pjit
from jax.sharding import Mesh

from xlashard._jax import private
from xlashard._jax.private import (
    config,
    jax_dispatch,
    jax_pjit,
    mesh_lib,
    original_value,
    pmap_lib,
    read_lazily,
    real_module,
    replace_name,
    xc,
)
from xlashard._jax.runtime.global_state import hook_before
from xlashard.errors import MeshError
from xlashard.support.tracebacks import short_tracebacks

if TYPE_CHECKING:
    # Whole modules: `xlashard.legacy.modules` lists the names that programs use.
    core: Any
    jaxprs: Any
    functions: Any
    linear_util: Any
    util: Any
    xla_bridge: Any
    xla_client: Any
    xla_extension: Any
    ad: Any
    batching: Any
    partial_eval: Any
    source_info_util: Any
    clusters: Any
    lib: Any
    mlir: Any
    settings: Any
    generators: Any
    key_types: Any
    random: Any
    compilation_cache: Any
    backend: Any
    compile_options: Any
    pmap: Any
    """JAX's own `pmap`, also while `jax.pmap` is replaced."""
    EMPTY_MESH: Mesh
    """The mesh without devices, which is in force outside of every `with mesh:` block."""
else:
    __getattr__ = read_lazily(
        globals(),
        {
            "core": lambda: real_module(private.core),
            "jaxprs": lambda: real_module(private.extend_core),
            "functions": lambda: real_module(private.extend_linear_util),
            "linear_util": lambda: real_module(private.linear_util),
            "util": lambda: real_module(private.util),
            "xla_bridge": lambda: real_module(private.xla_bridge),
            "xla_client": lambda: real_module(private.xc),
            "xla_extension": lambda: real_module(private.lib_jax),
            "ad": lambda: real_module(private.ad),
            "batching": lambda: real_module(private.batching),
            "partial_eval": lambda: real_module(private.pe),
            "source_info_util": lambda: real_module(private.source_info_util),
            "clusters": lambda: real_module(private.cloud_tpu_cluster),
            "lib": lambda: real_module(private.lib),
            "mlir": lambda: real_module(private.mlir),
            "settings": lambda: real_module(private.config),
            "generators": lambda: real_module(private.extend_random),
            "key_types": lambda: real_module(private.prng),
            "random": lambda: real_module(private.random_lib),
            "compilation_cache": lambda: real_module(private.compilation_cache),
            "backend": lambda: real_module(private.extend_backend),
            "compile_options": lambda: private.jax_compiler.get_compile_options,
            "pmap": lambda: pmap_lib.pmap,
            "EMPTY_MESH": lambda: mesh_lib.EMPTY_ENV.physical_mesh,
        },
    )


def concrete_class(shown: type) -> Any:
    """Return the concrete class of a public class of JAX, for `jax.Array` that of handles."""
    return xc.ArrayImpl if shown is jax.Array else shown


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
            "axis_types": (jax.sharding.AxisType.Auto,) * len(axis_names),
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
    size_of = pmap_lib._mapped_axis_size

    @functools.wraps(size_of)
    def checked(args: Sequence[Any], in_axes: Any) -> Any:
        for arg in args:
            if isinstance(arg, array_type):
                with short_tracebacks:
                    refuse(arg)
        return size_of(args, in_axes)

    # Every call looks the function up by this name, also calls of functions wrapped before.
    replace_name(pmap_lib, "_mapped_axis_size", checked)


class TopLevelComputation(NamedTuple):
    """A function that JAX is about to compile and run at the top level.

    Attributes:
        name: The name of the function.
        is_eager: True for an operation such as `jax.numpy.add`, False for a function that a program
            passed to `jax.jit`.
    """

    name: str
    is_eager: bool


def watch_computations(check: Callable[[TopLevelComputation, Sequence[Any]], None] | None) -> None:
    """Call a function with each computation that JAX's dispatcher has not seen; None for no more.

    An exception of the function keeps the computation from running, and from being repeated by the
    dispatcher.
    """
    compile_and_run = original_value(jax_pjit, "_pjit_call_impl_python")

    def checked(*args: Any, **parameters: Any) -> Any:
        name = parameters["name"]
        source = str(parameters["jaxpr"].debug_info.func_src_info)
        # JAX inlines most functions of jax.numpy, and runs primitives by a function of its own.
        inline = parameters["inline"]
        inlined = getattr(inline, "name", inline) in (True, "JAX_EARLY")
        is_eager = inlined or f" at {jax_dispatch.__file__}:" in source
        assert check is not None
        check(TopLevelComputation(name, is_eager), args)
        return compile_and_run(*args, **parameters)

    replace_name(jax_pjit, "_pjit_call_impl_python", compile_and_run if check is None else checked)


type Flag = Any
"""A setting: `flag.value` is the current value, `flag(value)` a context manager for one thread."""


def new_flag[T: (bool, str)](name: str, default: T, about: str, parse: Callable[[Any], T]) -> Flag:
    """Create a setting that is part of JAX's trace context and dispatch key.

    Args:
        name: Its name.
        default: Its initial value in all threads.
        about: One sentence for the command line's help.
        parse: Parses and checks an assigned value.
    """
    flag = config.State(
        name,
        default,
        about,
        parser=parse,
        default_context_manager_value=True,
        include_in_jit_key=True,
        include_in_trace_context=True,
    )
    # Keep the setting out of JAX's own list.
    config.config_states.pop(name)
    return flag


def set_everywhere(flag: Flag, value: Any) -> None:
    """Set the global value, for all threads without a value of their own."""
    flag._set(value)


def own_flag(name: str) -> Flag:
    """Return a setting of JAX."""
    return config.config_states[name]


def show(flags: Sequence[Flag]) -> None:
    """Add settings to `jax.config`: its attributes, `update` and the command line."""
    for flag in flags:
        if flag.name in jax.config._value_holders:
            continue
        jax.config._contextmanager_flags.add(flag.name)
        jax.config.add_option(
            flag.name, flag, type(flag.value), meta_args=[], meta_kwargs={"help": flag.__doc__}
        )
        setattr(config.Config, flag.name, _read_only(flag))
        if jax.config.use_absl:
            _define(flag)


def _read_only(flag: Flag) -> property:
    return property(lambda _: flag.value)


def code_of_reads() -> CodeType:
    """Return the code that runs when a program reads one of these settings from `jax.config`."""
    reader = _read_only(None).fget
    assert reader is not None
    return reader.__code__


def hide(flags: Sequence[Flag]) -> None:
    """Remove settings from `jax.config`; their values stay."""
    for flag in flags:
        if jax.config._value_holders.get(flag.name) is not flag:
            continue
        jax.config._contextmanager_flags.discard(flag.name)
        del jax.config._value_holders[flag.name], jax.config.meta[flag.name]
        delattr(config.Config, flag.name)
        if jax.config.use_absl and flag.name in jax.config.absl_flags.FLAGS:
            delattr(jax.config.absl_flags.FLAGS, flag.name)


def define_for_absl(flags: Sequence[Flag]) -> None:
    """Let `absl.app.run` parse settings and all of JAX's own from the command line."""
    if not jax.config.use_absl:
        jax.config.config_with_absl()
    for flag in flags:
        _define(flag)
    absl_app().call_after_init(lambda: take_from_absl(flags))


def absl_app() -> Any:
    """Import and return `absl.app`.

    Raises:
        ImportError: absl is not installed.
    """
    from absl import app  # an optional package

    return app


def parse_with_absl(flags: Sequence[Flag], arguments: Sequence[str]) -> None:
    """Parse settings and all of JAX's own from a command line, without `absl.app.run`.

    Args:
        flags: The settings.
        arguments: The arguments of the command line.
    """
    jax.config.parse_flags_with_absl()
    for flag in flags:
        _define(flag)
    names = tuple(f"--{sign}{flag.name}" for flag in flags for sign in ("", "no"))
    own = [a for a in takewhile(lambda a: a != "--", arguments) if a.split("=")[0] in names]
    jax.config.absl_flags.FLAGS(["", *own], known_only=True)
    take_from_absl(flags)


def take_from_absl(flags: Sequence[Flag]) -> None:
    """Set the values that the command line contained."""
    for flag in flags:
        value = jax.config.absl_flags.FLAGS[flag.name]
        if value.present:
            flag._set(value.value)


def _define(flag: Flag) -> None:
    flags = jax.config.absl_flags
    if flag.name not in flags.FLAGS:
        define: Any = flags.DEFINE_bool if isinstance(flag.value, bool) else flags.DEFINE_string
        define(flag.name, flag.value, help=flag.__doc__)
