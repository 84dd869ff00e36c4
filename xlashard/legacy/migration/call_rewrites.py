"""Rewriting of calls to the arguments of today's functions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import libcst as cst

from xlashard.legacy.migration.resolver import ProgramFacts

FROM_GDA = "_from_gda_"
"""Temporary name of FROM_GDA until the enclosing resources are rewritten."""

PJIT_ARGUMENTS = (
    "fun",
    "in_axis_resources",
    "out_axis_resources",
    "static_argnums",
    "donate_argnums",
)
_TODAY = {"in_axis_resources": "in_shardings", "out_axis_resources": "out_shardings"}
_GDA_ARGUMENTS = ("global_shape", "global_mesh", "mesh_axes")


@dataclass
class Needs:
    """Imports and helper functions that a migrated program needs.

    Attributes:
        modules: Modules to import, by full name.
        helpers: Helper functions to insert.
    """

    modules: set[str] = field(default_factory=set)
    helpers: set[str] = field(default_factory=set)


def code_of(node: cst.CSTNode) -> str:
    """Return the text of a node."""
    return cst.Module([]).code_for_node(node)


def expression(code: str) -> cst.BaseExpression:
    """Parse an expression."""
    return cst.parse_expression(code)


def without_keyword(arg: cst.Arg) -> cst.Arg:
    """Return a keyword argument as a positional one."""
    return arg.with_changes(keyword=None, equal=cst.MaybeSentinel.DEFAULT)


def bound(args: Sequence[cst.Arg], names: Sequence[str]) -> dict[str, cst.Arg] | None:
    """Return the arguments of a call by name; None if it has `*args` or `**kwargs`.

    Args:
        args: The arguments.
        names: The names of the positional arguments.
    """
    if any(arg.star for arg in args):
        return None
    by_position = [arg for arg in args if arg.keyword is None]
    if len(by_position) > len(names):
        return None
    positional = dict(zip(names, by_position, strict=False))
    return {**positional, **{arg.keyword.value: arg for arg in args if arg.keyword is not None}}


def laid_out(args: Sequence[cst.Arg], like: Sequence[cst.Arg]) -> list[cst.Arg]:
    """Return arguments with the commas and whitespace of those that they replace.

    Args:
        args: The new arguments.
        like: The replaced arguments.
    """
    plain = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    out = [
        arg.with_changes(comma=plain) if isinstance(arg.comma, cst.MaybeSentinel) else arg
        for arg in args
    ]
    if out:
        last = like[-1]
        space = last.whitespace_after_arg
        out[-1] = out[-1].with_changes(comma=last.comma, whitespace_after_arg=space)
    return out


def shardings(facts: ProgramFacts, needs: Needs, node: cst.BaseExpression) -> cst.BaseExpression:
    """Return resources with P() in place of None, and with None in place of FROM_GDA.

    Args:
        facts: The facts of the program.
        needs: Collects imports and helpers.
        node: The resources, with names already rewritten.
    """
    rewrite = partial(shardings, facts, needs)
    if isinstance(node, cst.Name) and node.value in ("None", FROM_GDA, *facts.specs):
        if node.value == "None":
            needs.modules.add("jax")
            return expression("jax.P()")
        return node.with_changes(value="None") if node.value == FROM_GDA else node
    if isinstance(node, cst.Tuple | cst.List | cst.Dict):
        elements = [
            each.with_changes(value=rewrite(each.value))
            if isinstance(each, cst.Element | cst.DictElement)
            else each
            for each in node.elements
        ]
        return node.with_changes(elements=elements)
    if isinstance(node, cst.IfExp):
        return node.with_changes(body=rewrite(node.body), orelse=rewrite(node.orelse))
    if isinstance(node, cst.Call) and code_of(node.func) in ("jax.P", *facts.spec_classes):
        return node
    needs.helpers.add("_none_is_replicated")
    return cst.Call(cst.Name("_none_is_replicated"), [cst.Arg(node)])


def jit_arguments(
    args: Sequence[cst.Arg],
    names: Sequence[str],
    rewrite: Callable[[cst.BaseExpression], cst.BaseExpression],
) -> list[cst.Arg] | None:
    """Return the arguments of `jax.jit` for those of `pjit`; None if it has `*args`.

    Args:
        args: The arguments.
        names: The names of the positional arguments.
        rewrite: Rewrites resources.
    """
    if any(arg.star for arg in args) or len([a for a in args if a.keyword is None]) > len(names):
        return None
    out = []
    positions = iter(names)
    for arg in args:
        name = arg.keyword.value if arg.keyword is not None else next(positions)
        if name in (*_TODAY, *_TODAY.values()):
            arg = arg.with_changes(value=rewrite(arg.value))
        if name != "fun":
            arg = arg.with_changes(
                keyword=cst.Name(_TODAY.get(name, name)),
                equal=cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace("")),
            )
        out.append(arg)
    return out


def array_call(call: cst.Call, method: str, needs: Needs) -> cst.Call | None:
    """Return today's call for a constructor of `GlobalDeviceArray`.

    Args:
        call: The call, with names already rewritten.
        method: `from_callback`; empty for the class itself.
        needs: Collects imports and helpers.
    """
    last = "data_callback" if method else "device_buffers"
    by_name = bound(call.args, (*_GDA_ARGUMENTS, last))
    if by_name is None or not by_name.keys() >= {*_GDA_ARGUMENTS, last}:
        return None
    needs.modules.add("jax")
    made = "jax.make_array_from_callback" if method else "jax.make_array_from_single_device_arrays"
    shape, mesh, end = (without_keyword(by_name[n]) for n in ("global_shape", "global_mesh", last))
    placed = mesh.with_changes(value=sharding(by_name["global_mesh"], by_name["mesh_axes"]))
    args = laid_out([shape, placed, end], call.args)
    return call.with_changes(func=expression(made), args=args)


def sharding(mesh: cst.Arg, axes: cst.Arg) -> cst.BaseExpression:
    """Return the `NamedSharding` of a mesh and of its axes."""
    return expression(f"jax.sharding.NamedSharding({code_of(mesh.value)}, {code_of(axes.value)})")


def shard_call(call: cst.Call, method: str, needs: Needs) -> cst.Call | None:
    """Return the call of a sharding's method for a function of a shape, mesh and axes.

    Args:
        call: The call of the function.
        method: The method.
        needs: Collects imports and helpers.
    """
    by_name = bound(call.args, _GDA_ARGUMENTS)
    if by_name is None or by_name.keys() != {*_GDA_ARGUMENTS}:
        return None
    needs.modules.add("jax")
    placed = sharding(by_name["global_mesh"], by_name["mesh_axes"])
    shape = without_keyword(by_name["global_shape"])
    func = cst.Attribute(placed, cst.Name(method))
    return call.with_changes(func=func, args=laid_out([shape], call.args))


def deserialize_call(call: cst.Call) -> cst.Call:
    """Return `async_deserialize` with a sharding instead of a mesh and axes.

    Args:
        call: The call.
    """
    names = ("mesh", "mesh_axes")
    by_name = bound(call.args, (*names, *(f"{n}" for n in range(len(call.args)))))
    if by_name is None or not by_name.keys() >= {*names}:
        return call
    placed = without_keyword(by_name["mesh"]).with_changes(
        value=sharding(by_name["mesh"], by_name["mesh_axes"])
    )
    rest = [arg for arg in call.args if arg not in (by_name["mesh"], by_name["mesh_axes"])]
    return call.with_changes(args=laid_out([placed, *rest], call.args))
