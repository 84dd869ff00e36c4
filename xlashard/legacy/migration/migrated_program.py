"""`migrate`, and the helper functions that it inserts into programs."""

# The inserted functions have no annotations, and a program imports what they read.
# pyright: reportAttributeAccessIssue=false, reportOptionalIterable=false

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import libcst as cst
from libcst import matchers as m
from libcst.metadata import MetadataWrapper

from xlashard.legacy.migration.call_rewrites import FROM_GDA, Needs
from xlashard.legacy.migration.resolver import Resolver, facts_of
from xlashard.legacy.migration.rewriter import Rewriter


@dataclass(frozen=True)
class Migrated:
    """Migrated program.

    Attributes:
        code: The source code.
        marked: The number of comments on lines that need manual changes.
    """

    code: str
    marked: int


def migrate(code: str) -> Migrated:
    r"""Rewrite a program for today's JAX.

    Args:
        code: The source code.

    Raises:
        libcst.ParserSyntaxError: The code is not valid Python.

    Example:
        >>> print(migrate("from jax import tree_map\nx = tree_map(abs, [-1])\n").code, end="")
        import jax
        x = jax.tree.map(abs, [-1])
    """
    wrapper = MetadataWrapper(cst.parse_module(code))
    rewriter = Rewriter(Resolver(wrapper), facts_of(wrapper))
    rewritten = wrapper.visit(rewriter)
    # FROM_GDA outside of `pjit` calls.
    module = m.replace(rewritten, m.Name(FROM_GDA), lambda node, _: node.with_changes(value="None"))
    return Migrated(
        _with_needs(cst.ensure_type(module, cst.Module), rewriter.needs).code, rewriter.marked
    )


def _with_needs(module: cst.Module, needs: Needs) -> cst.Module:
    """Insert the required imports and helper functions into a program."""
    modules = {*needs.modules, *["jax"] * bool(needs.helpers)}
    modules |= {_MODULES[name] for name in needs.helpers if name in _MODULES}
    callees = {_CALLS[name] for name in needs.helpers if name in _CALLS}
    names = sorted(needs.helpers | callees)
    helpers = [inspect.getsource(globals()[name]) for name in names]
    body = list(module.body)
    missing = sorted(modules - set(_imported(body)))
    first = _first_import(body)
    lines = [cst.parse_statement(f"import {name}\n") for name in missing]
    if lines and first < len(body) and hasattr(body[first], "leading_lines"):
        leading = body[first].leading_lines  # type: ignore[union-attr]
        lines[0] = lines[0].with_changes(leading_lines=leading)
        body[first] = body[first].with_changes(leading_lines=[])
    body[first:first] = lines
    last = _last_import(body)
    for number, helper in enumerate(helpers):
        lines = [cst.EmptyLine(indent=False), cst.EmptyLine(indent=False)]
        function = cst.parse_statement(helper).with_changes(leading_lines=lines)
        body.insert(last + number, function)
    return module.with_changes(body=body)


def _imported(body: Sequence[cst.CSTNode]) -> Iterator[str]:
    for line in body:
        for each in line.body if isinstance(line, cst.SimpleStatementLine) else ():
            if isinstance(each, cst.Import):
                for alias in each.names:
                    if alias.asname is None:
                        # `import a.b` binds `a`.
                        yield from (alias.evaluated_name, alias.evaluated_name.partition(".")[0])


def _is_import(line: cst.CSTNode) -> bool:
    return isinstance(line, cst.SimpleStatementLine) and isinstance(
        line.body[0], cst.Import | cst.ImportFrom
    )


def _is_future(line: cst.CSTNode) -> bool:
    return "__future__" in cst.Module([line]).code if _is_import(line) else False  # type: ignore[list-item]


def _first_import(body: Sequence[cst.CSTNode]) -> int:
    """Return the position for new imports: after the docstring and `__future__` imports."""
    for place, line in enumerate(body):
        if _is_import(line) and not _is_future(line):
            return place
    has_docstring = cst.Module(list(body)).get_docstring() is not None  # type: ignore[arg-type]
    return has_docstring + sum(map(_is_future, body))


def _last_import(body: Sequence[cst.CSTNode]) -> int:
    """Return the position after the last import at module level."""
    places = [place for place, line in enumerate(body) if _is_import(line)]
    return places[-1] + 1 if places else _first_import(body)


_CALLS = {"_device_put_replicated": "_device_put_sharded"}
_MODULES = {
    "_call_host": "jax.experimental",
    "_get_metadata": "jax.experimental.array_serialization.serialization",
}
"""Modules that a helper needs besides `jax`."""


def _none_is_replicated(specs):
    """Write P() for None, which meant replicated to pjit."""
    return jax.tree.map(
        lambda spec: jax.P() if spec is None else spec, specs, is_leaf=lambda x: x is None
    )


def _array_from_batched_callback(global_shape, global_mesh, mesh_axes, data_callback):
    """Make an array from the pieces that one call of a function returns."""
    sharding = jax.sharding.NamedSharding(global_mesh, mesh_axes)
    indices = sharding.addressable_devices_indices_map(tuple(global_shape))
    pieces = data_callback(list(indices.values()))
    arrays = [jax.device_put(piece, device) for device, piece in zip(indices, pieces)]
    return jax.make_array_from_single_device_arrays(tuple(global_shape), sharding, arrays)


def _array_from_batched_callback_with_devices(global_shape, global_mesh, mesh_axes, data_callback):
    """Make an array from the pieces that one call returns on their devices."""
    sharding = jax.sharding.NamedSharding(global_mesh, mesh_axes)
    placements = {}
    for device, index in sharding.addressable_devices_indices_map(tuple(global_shape)).items():
        key = tuple((each.start, each.stop) for each in index)
        placements.setdefault(key, (index, []))[1].append(device)
    arrays = data_callback([(index, tuple(devices)) for index, devices in placements.values()])
    return jax.make_array_from_single_device_arrays(tuple(global_shape), sharding, arrays)


def _device_put_sharded(shards, devices):
    """Stack one tree per device, as jax.pmap takes them."""
    mesh = jax.sharding.Mesh(list(devices), ("devices",))
    sharding = jax.sharding.NamedSharding(mesh, jax.P("devices"))

    def stack(*pieces):
        arrays = [
            jax.device_put(jax.numpy.asarray(piece)[None], device)
            for piece, device in zip(pieces, devices)
        ]
        shape = (len(arrays), *arrays[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, sharding, arrays)

    return jax.tree.map(stack, *shards)


def _device_put_replicated(x, devices):
    """Stack a tree once for each device, as jax.pmap takes it."""
    return _device_put_sharded([x] * len(devices), devices)


def _call_host(callback_func, arg, *, result_shape=None):
    """Call a Python function on the host, for its result or for its effect."""
    if result_shape is None:
        return jax.debug.callback(callback_func, arg)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), result_shape)
    return jax.experimental.io_callback(callback_func, shapes, arg)


def _get_metadata(arr):
    """Return the zarr metadata of an array, with its dtype."""
    spec = jax.experimental.array_serialization.serialization.get_tensorstore_spec(
        "/array", arr=arr
    )
    dtype = jax.numpy.dtype(arr.dtype)
    return {**spec["metadata"], "dtype": dtype.name if dtype.kind == "V" else dtype.str}


def _spec_has_metadata(spec):
    """Return True if a TensorStore spec, or one inside it, has metadata."""
    return "metadata" in spec or any(
        isinstance(part, dict) and _spec_has_metadata(part) for part in spec.values()
    )


def _id_tap(tap_func, arg, *, result=None, **kwargs):
    """Call a Python function on the host, and return the value."""
    jax.debug.callback(lambda value: tap_func(value, (), **kwargs), arg)
    return arg if result is None else result
