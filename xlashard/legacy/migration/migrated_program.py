"""`migrate`, and the helper functions that it inserts into programs."""

# The inserted functions have no annotations, and a program imports what they read.
# pyright: reportAttributeAccessIssue=false, reportOptionalIterable=false

import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import libcst as cst
from libcst import matchers as m
from libcst.metadata import MetadataWrapper

from xlashard.legacy.migration.calls import CallRewriter
from xlashard.legacy.migration.names import FROM_GDA, Needs, code_of, expression
from xlashard.legacy.migration.resolver import ENV, ProgramFacts, Resolver, facts_of

if TYPE_CHECKING:
    # The functions that are inserted into programs use it there.
    import jax

COMMENT = "# xlashard: "
"""Prefix of comments on lines that need manual changes."""

_HAVE_LINES_ABOVE = (
    *(cst.SimpleStatementLine, cst.FunctionDef, cst.ClassDef, cst.If, cst.For, cst.While),
    *(cst.With, cst.Try, cst.TryStar, cst.Match),
)
_SPEC_NAME = re.compile(r"(^|_)(pspec|spec|axes)$")


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


class Rewriter(CallRewriter):
    """Transformer that rewrites a program, and adds comments where it cannot.

    Args:
        resolver: Resolves the program's names.
        facts: The facts of the program.
    """

    def __init__(self, resolver: Resolver, facts: ProgramFacts) -> None:
        super().__init__(resolver, facts)
        self.marked = 0
        self._folded: set[cst.CSTNode | None] = set()

    def on_visit(self, node: cst.CSTNode) -> bool:
        """Start to collect the comments of a statement."""
        if isinstance(node, cst.BaseStatement):
            self._marks.append([])
        return super().on_visit(node)

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        """Insert the comments of a statement above it."""
        left = super().on_leave(original_node, updated_node)
        if not isinstance(original_node, cst.BaseStatement):
            return left
        marks = self._marks.pop()
        # A statement can become several statements, or none.
        lines: list[Any] = list(left) if isinstance(left, cst.FlattenSentinel) else [left]
        first = lines[0] if lines else left
        if not marks or not isinstance(first, _HAVE_LINES_ABOVE):
            return left
        self.marked += len(marks)
        comments = [cst.EmptyLine(comment=cst.Comment(f"{COMMENT}{mark}")) for mark in marks]
        lines[0] = first.with_changes(leading_lines=[*first.leading_lines, *comments])
        return lines[0] if len(lines) == 1 else cst.FlattenSentinel(lines)

    # Meshes.

    def leave_With(self, original_node: cst.With, updated_node: cst.With) -> cst.With:
        """Write `with jax.set_mesh(mesh):` for `with mesh:`."""
        items = [
            self._with_set_mesh(new) if self._is_mesh(old.item) else new
            for old, new in zip(original_node.items, updated_node.items, strict=True)
        ]
        return updated_node.with_changes(items=items)

    def leave_FunctionDef(
        self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef
    ) -> cst.FunctionDef:
        """Replace a mesh decorator by `with jax.set_mesh(mesh):` in the function."""
        decorators = list(zip(original_node.decorators, updated_node.decorators, strict=True))
        meshes = [new for old, new in decorators if self._is_mesh(old.decorator)]
        if not meshes or not isinstance(updated_node.body, cst.IndentedBlock):
            return updated_node
        items = [self._with_set_mesh(cst.WithItem(each.decorator)) for each in meshes]
        inner = cst.With(items, cst.IndentedBlock(updated_node.body.body))
        return updated_node.with_changes(
            decorators=[new for old, new in decorators if not self._is_mesh(old.decorator)],
            body=updated_node.body.with_changes(body=[inner]),
        )

    def _with_set_mesh(self, item: cst.WithItem) -> cst.WithItem:
        self.needs.modules.add("jax")
        mesh = code_of(item.item)
        if item.asname is not None:
            mesh = f"{code_of(item.asname.name)} := {mesh}"
        return item.with_changes(item=expression(f"jax.set_mesh({mesh})"), asname=None)

    def leave_Assign(self, original_node: cst.Assign, updated_node: cst.Assign) -> cst.Assign:
        """Mark assignments of the mesh in force."""
        for target in original_node.targets:
            if isinstance(target.target, cst.Attribute) and self._canonical(target.target) == ENV:
                self._mark(
                    "The mesh in force cannot be assigned. Write: with jax.set_mesh(mesh): ..."
                )
                return original_node
        return updated_node

    # Flags and comparisons.

    def leave_Comparison(
        self, original_node: cst.Comparison, updated_node: cst.Comparison
    ) -> cst.BaseExpression:
        """Rewrite comparisons of specs with tuples, and of the mesh's shape with `()`."""
        if len(original_node.comparisons) != 1:
            return updated_node
        (target,) = original_node.comparisons
        is_equal = isinstance(target.operator, cst.Equal)
        if not is_equal and not isinstance(target.operator, cst.NotEqual):
            return updated_node
        if self._canonical(original_node.left) == f"{ENV}.physical_mesh.devices.shape":
            self.needs.modules.add("jax")
            return expression(f"{'' if is_equal else 'not '}jax.sharding.get_abstract_mesh().empty")
        left = updated_node.left
        name = left.attr.value if isinstance(left, cst.Attribute) else code_of(left)
        if _is_axes(target.comparator) and self._facts.spec_classes and _SPEC_NAME.search(name):
            return updated_node.with_changes(left=expression(f"tuple({code_of(left)})"))
        return updated_node

    def leave_BooleanOperation(
        self, original_node: cst.BooleanOperation, updated_node: cst.BooleanOperation
    ) -> cst.BaseExpression:
        """Fold flags with a constant value."""
        absorbing = "False" if isinstance(updated_node.operator, cst.And) else "True"
        for one, other in (
            (updated_node.left, updated_node.right),
            (updated_node.right, updated_node.left),
        ):
            if isinstance(one, cst.Name) and one.value in ("True", "False"):
                return one if one.value == absorbing else other
        return updated_node

    def leave_UnaryOperation(
        self, original_node: cst.UnaryOperation, updated_node: cst.UnaryOperation
    ) -> cst.BaseExpression:
        """Fold the negation of a flag with a constant value."""
        inner = updated_node.expression
        if isinstance(updated_node.operator, cst.Not) and code_of(inner) in ("True", "False"):
            return cst.Name("False" if code_of(inner) == "True" else "True")
        return updated_node

    def leave_If(self, original_node: cst.If, updated_node: cst.If) -> Any:
        """Keep the taken branch of a constant flag."""
        test = updated_node.test
        if code_of(original_node.test) == code_of(test) or not isinstance(test, cst.Name):
            return updated_node
        if isinstance(self._resolver.parent(original_node), cst.If):
            return updated_node
        self._folded.add(self._resolver.parent(original_node))
        branch = updated_node if test.value == "True" else updated_node.orelse
        if isinstance(branch, cst.If) and test.value == "False":
            return branch
        if test.value not in ("True", "False"):
            return updated_node
        if branch is None:
            return cst.RemoveFromParent()
        lines = branch.body.body if isinstance(branch.body, cst.IndentedBlock) else None
        if lines is None:
            return updated_node
        if all(m.matches(line, m.SimpleStatementLine([m.Pass()])) for line in lines):
            return cst.RemoveFromParent()
        first = lines[0].with_changes(leading_lines=updated_node.leading_lines)
        return cst.FlattenSentinel([first, *lines[1:]])

    def leave_IndentedBlock(
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        """Drop code after a `return` that is always reached once a flag is folded."""
        if original_node not in self._folded:
            return updated_node
        lines = list(updated_node.body)
        ends = [n for n, line in enumerate(lines) if _is_end(line)]
        return updated_node.with_changes(body=lines[: ends[0] + 1] if ends else lines)


def _is_end(line: cst.BaseStatement) -> bool:
    return isinstance(line, cst.SimpleStatementLine) and isinstance(
        line.body[-1], cst.Return | cst.Raise | cst.Break | cst.Continue
    )


def _is_axes(node: cst.BaseExpression) -> bool:
    """Return True for a tuple of axis names and None."""
    return isinstance(node, cst.Tuple) and all(
        isinstance(each.value, cst.SimpleString) or code_of(each.value) == "None"
        for each in node.elements
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
