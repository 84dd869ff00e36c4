"""Run the text of a program under any library."""

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from tests.core.pjit.random_programs.environment import Library, P, environment, scalar
from xlashard.errors import DeletedError, DonationError

MANNERS = ("with", "with", "named", "named", "set_mesh")
"""Ways to specify a mesh: `with mesh:`, in shardings, by `jax.set_mesh`."""


_LATER = ("first", "explicit", "automatic", "exact", "bare", "tables")


@dataclass(frozen=True)
class Module:
    """Bindings of the text of a program, read under one library.

    Attributes:
        f: The function.
        axes: Names and sizes of the mesh's axes.
        first: The position of the mesh's first device among all devices.
        backwards: True if the mesh has its devices in reverse order.
        explicit: True if the axes of the mesh are explicit.
        automatic: Axes that stay automatic beside explicit ones.
        manner: One of `MANNERS`.
        call: One of `CALLS`.
        partitioner: `shardy` or `gspmd`.
        arguments: The arguments, on the host.
        placed: The spec by which each is sharded before the call, or None.
        options: Keywords of pjit.
        exact: For each result, whether every way of computing it gives the same bits.
        bare: True if its transformation has no `jax.jit` around it, beside JAX.
        tables: Arrays that its function has closed over, as they are made.
    """

    f: Callable[..., Any]
    axes: Mapping[str, int]
    backwards: bool
    manner: str
    call: str
    partitioner: str
    arguments: tuple[Any, ...]
    placed: tuple[Any, ...]
    options: Mapping[str, Any]
    first: int = 0
    explicit: bool = False
    automatic: tuple[str, ...] = ()
    exact: tuple[bool, ...] = ()
    bare: bool = False
    tables: list[Any] = field(default_factory=list)

    @classmethod
    def read(cls, text: str, library: Library) -> "Module":
        names = environment(library)
        exec(compile(text, "<random program>", "exec"), names)
        options = {key: names[key] for key in ("in_shardings", "out_shardings")} | names["options"]
        # Without arguments there is nothing for an empty tuple to be a prefix of in old JAX.
        if not names["arguments"]:
            del options["in_shardings"]
        if names["donated"]:
            options["donate_argnums"] = names["donated"]
        wanted = ("axes", "backwards", "manner", "call", "partitioner", "arguments", "placed")
        later = {key: names[key] for key in _LATER if key in names}
        return cls(names["f"], options=options, **{key: names[key] for key in wanted}, **later)

    @property
    def floats(self) -> tuple[int, ...]:
        """Positions of the arguments that a derivative may be taken by."""
        return tuple(
            i
            for i, x in enumerate(self.arguments)
            if isinstance(x, float) or jnp.issubdtype(x.dtype, jnp.floating)
        )


def read_header(text: str) -> Module:
    """Return the bindings of a text that is not run."""
    nothing = Library("nothing", *[lambda *_, **__: None] * 7)
    return Module.read(text, nothing)


def make_mesh(module: Module) -> jax.sharding.Mesh:
    """Return the mesh of a program."""
    sizes = tuple(module.axes.values())
    devices = jax.devices()[module.first :][: int(np.prod(sizes))]
    if module.backwards:
        devices = devices[::-1]
    kinds = tuple(
        AxisType.Explicit if module.explicit and axis not in module.automatic else AxisType.Auto
        for axis in module.axes
    )
    grid = np.array(devices).reshape(sizes)
    return jax.sharding.Mesh(grid, tuple(module.axes), axis_types=kinds)


@contextlib.contextmanager
def under(partitioner: str) -> Any:
    """Set the partitioner within a block."""
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", partitioner == "shardy")
    try:
        yield
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)


def run(
    text: str, library: Library, mesh: jax.sharding.Mesh | None = None, manner: str | None = None
) -> list[Any]:
    """Return the results of each call of a program.

    Args:
        text: The program.
        library: Source of its functions.
        mesh: The mesh in force, in the program's manner, or None.
        manner: How the mesh is specified, instead of the program's way.
    """
    module = Module.read(text, library)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*donat", category=UserWarning)
        warnings.filterwarnings("ignore", message=".*with mesh", category=DeprecationWarning)
        with _in_force(mesh, manner or module.manner):
            # Asynchronous errors should be raised here.
            return jax.block_until_ready(CALLS_BY_NAME[module.call](module, library))


def _in_force(mesh: jax.sharding.Mesh | None, manner: str) -> Any:
    if mesh is None or manner == "named":
        return contextlib.nullcontext()
    return mesh if manner == "with" else jax.set_mesh(mesh)


def _given(module: Module, library: Library) -> list[Any]:
    """Return the arguments, put again because some are donated."""
    return [
        jax.tree.map(lambda leaf, spec=spec: library.put(leaf, spec), x)
        for x, spec in zip(module.arguments, module.placed, strict=True)
    ]


def _compiled(module: Module, library: Library) -> Any:
    return library.pjit(module.f, **module.options)


def _call(module: Module, library: Library) -> list[Any]:
    f = _compiled(module, library)
    _give_twice(module, library)
    module.tables.clear()
    results = [f(*_given(module, library)) for _ in range(2)]
    _lose_tables(f, module, library, results[0])
    return results


def _give_twice(module: Module, library: Library) -> None:
    """Pass a donated argument a second time, with its sharding and as an uncommitted array.

    A call that would take over its buffers is refused, and leaves it whole. JAX may hang.
    """
    donated = module.options.get("donate_argnums")
    if not isinstance(donated, tuple) or library.name != "xlashard":
        return
    f = library.pjit(lambda *args: (module.f(*args[:-1]), args[-1]), donate_argnums=donated)
    for place in (lambda x: x, lambda x: jnp.asarray(x) if _is_host(x) else x):
        args = jax.tree.map(place, _given(module, library))
        again = args[donated[0]]
        values = list(map(np.array, jax.tree.leaves(again)))
        try:
            result = f(*args, again)[1]
        except DonationError:
            result = again
        _require_equal(result, values)


def _lose_tables(f: Any, module: Module, library: Library, result: Any) -> None:
    """Delete the arrays that a function has closed over, and call it again.

    The call is refused, or independent of their values; JAX has copies in its program.
    """
    if library.name != "xlashard" or not module.tables:
        return
    values = list(map(np.array, map(read_value, jax.tree.leaves(result))))
    for table in module.tables:
        table.delete()
    try:
        again = f(*_given(module, library))
    except DeletedError:
        return
    _require_equal(again, values)


def _require_equal(result: Any, values: Sequence[np.ndarray]) -> None:
    for leaf, value in zip(jax.tree.leaves(result), values, strict=True):
        np.testing.assert_array_equal(read_value(leaf), value)


def is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def is_unreduced(x: Any) -> bool:
    return isinstance(x.sharding, jax.sharding.NamedSharding) and bool(x.sharding.spec.unreduced)


def read_value(x: Any) -> np.ndarray:
    """Return the value of a result, the sum of partial ones, or the numbers of keys."""
    if isinstance(x, jax.Array) and is_unreduced(x):
        x = jax.reshard(x, jax.sharding.NamedSharding(x.sharding.mesh, jax.P()))
    return np.asarray(jax.random.key_data(x) if is_key(x) else x)


def _anew(module: Module, library: Library) -> list[Any]:
    """Call one function with arguments from the host, sharded ones, and on one device in turn."""
    f, given = _compiled(module, library), _given
    outs = [f(*module.arguments), f(*given(module, library))]
    # Under jax.set_mesh, jnp.asarray returns arrays that are committed to the mesh.
    if module.manner != "set_mesh":
        outs.append(
            f(*jax.tree.map(lambda x: jnp.asarray(x) if _is_host(x) else x, module.arguments))
        )
    return [*outs, f(*module.arguments), f(*given(module, library))]


def _is_host(x: Any) -> bool:
    return isinstance(x, np.ndarray)


def _lower(module: Module, library: Library) -> list[Any]:
    compiled = _compiled(module, library).lower(*_given(module, library)).compile()
    return [compiled(*_given(module, library)) for _ in range(2)]


def _nested(module: Module, library: Library) -> list[Any]:
    f = _compiled(module, library)
    return [library.pjit(lambda *args: f(*args))(*_given(module, library))]


def _jit(module: Module, library: Library) -> list[Any]:
    return [jax.jit(_compiled(module, library))(*_given(module, library))]


def _of_floats(f: Callable[..., Any], module: Module, args: Sequence[Any]) -> Callable[..., Any]:
    """Return a function of the arguments that a derivative may be taken by."""

    def of_floats(*floats: Any) -> Any:
        full = list(args)
        for i, value in zip(module.floats, floats, strict=True):
            full[i] = value
        return f(*full)

    return of_floats


# One program in place of one for each of its operations.
_total = jax.jit(scalar)


def _derive(module: Module, library: Library, around: Callable[..., Any]) -> list[Any]:
    args = _given(module, library)
    f = _of_floats(around(_compiled(module, library)), module, args)
    floats = [args[i] for i in module.floats]

    def loss(*floats: Any) -> jax.Array:
        return _total(*[x for x in jax.tree.leaves(f(*floats)) if jnp.isrealobj(x)])

    return [library.whole(jax.grad(loss, argnums=tuple(range(len(floats)))))(*floats)]


def _grad(module: Module, library: Library) -> list[Any]:
    return _derive(module, library, lambda f: f)


def _remat(module: Module, library: Library) -> list[Any]:
    return _derive(module, library, jax.checkpoint)


def _jvp(module: Module, library: Library) -> list[Any]:
    args = _given(module, library)
    f = _of_floats(_compiled(module, library), module, args)
    floats = [args[i] for i in module.floats]
    tangents = [jnp.cos(x).astype(jnp.asarray(x).dtype) for x in floats]
    return [library.whole(lambda *each: jax.jvp(f, each, tuple(tangents)))(*floats)]


def _vmap(module: Module, library: Library) -> list[Any]:
    args = [
        library.put(_two(x), None if spec is None else P(None, *spec))
        for x, spec in zip(module.arguments, module.placed, strict=True)
    ]
    return [library.whole(jax.vmap(_compiled(module, library)))(*args)]


def _two(x: Any) -> Any:
    """Stack two different values, `[2, ...]`."""
    if isinstance(x, jax.Array):
        return jnp.stack([x, x[::-1] if x.ndim else x])
    return np.stack([x, np.roll(x, 1)])


CALLS_BY_NAME: Mapping[str, Callable[[Module, Library], list[Any]]] = {
    "call": _call,
    "anew": _anew,
    "lower": _lower,
    "jit": _jit,
    "nested": _nested,
    "grad": _grad,
    "remat": _remat,
    "jvp": _jvp,
    "vmap": _vmap,
}
CALLS = (
    ("call",) * 4
    + ("anew",) * 3
    + ("lower",) * 2
    + ("jit", "nested", "grad", "remat", "jvp", "vmap")
)
"""Kinds of calls, as often as each is drawn."""
SMOOTH_CALLS = ("grad", "remat", "jvp")
"""Calls that take derivatives."""
CALLS_OF_TREES = ("call", "anew", "lower", "jit", "nested")
"""Calls without a transformation, with arguments of any structure."""
