"""Rewriting of calls to the arguments of today's functions."""

import re
from collections.abc import Sequence
from typing import Any

import libcst as cst
from libcst import matchers as m

from xlashard.legacy.migration.names import (
    FROM_GDA,
    SHARD_METHODS,
    NameRewriter,
    Needs,
    code_of,
    expression,
)
from xlashard.legacy.migration.resolver import GDA, PJIT, canonical

PJIT_ARGUMENTS = (
    "fun",
    "in_axis_resources",
    "out_axis_resources",
    "static_argnums",
    "donate_argnums",
)
_TODAY = {"in_axis_resources": "in_shardings", "out_axis_resources": "out_shardings"}
_GDA_ARGUMENTS = ("global_shape", "global_mesh", "mesh_axes")
_MESHES = (
    "jax.sharding.Mesh",
    "jax.experimental.maps.Mesh",
    "jax.experimental.maps.mesh",
    "jax.interpreters.pxla.Mesh",
)
_MESH_NAME = re.compile(r"(^|_)mesh$")


class CallRewriter(NameRewriter):
    """Transformer that rewrites calls, and the names in them."""

    def leave_SimpleString(
        self, original_node: cst.SimpleString, updated_node: cst.SimpleString
    ) -> cst.SimpleString:
        """Replace the name of the `jit` primitive by today's."""
        if not self._facts.walks_jaxprs:
            return updated_node
        old = re.fullmatch(r"([\"'])(pjit|xla_call)\1", updated_node.value)
        return updated_node.with_changes(value=f"{old[1]}jit{old[1]}") if old else updated_node

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> Any:
        """Rewrite a call whose arguments have changed."""
        name = self._resolver.name(original_node.func) or ""
        first = original_node.args[0].value if original_node.args else None
        if name == "functools.partial" and first and self._canonical(first) == PJIT:
            return self._jit(updated_node, 1, PJIT_ARGUMENTS)
        by_position = self._partial_of_pjit(original_node.func)
        if by_position is not None:
            return self._jit(updated_node, 0, PJIT_ARGUMENTS[by_position:])
        known = canonical(name)
        if known == PJIT:
            return self._jit(updated_node, 0, PJIT_ARGUMENTS)
        if known in (GDA, f"{GDA}.from_callback"):
            call = array_call(updated_node, known[len(GDA) + 1 :], self.needs)
            if call is None:
                self._mark(f"{known} is gone. Write: jax.make_array_from_callback(...)")
            return call or updated_node
        if known == "jax.eval_shape" and first is not None:
            self._mark_traced_mesh(first)
        if known.endswith(".async_deserialize") and first is not None and self._is_mesh(first):
            return deserialize_call(updated_node)
        if known in SHARD_METHODS:
            return shard_call(updated_node, SHARD_METHODS[known], self.needs) or updated_node
        func = original_node.func
        if isinstance(func, cst.Attribute) and not name:
            return self._method_call(func.attr.value, updated_node)
        if isinstance(func, cst.Name) and func.value == "isinstance":
            return self._isinstance(original_node, updated_node)
        return updated_node

    def _method_call(self, method: str, updated: cst.Call) -> Any:
        if method == "lower":
            args = [
                arg
                for arg in updated.args
                if arg.keyword is None or arg.keyword.value != "_global_avals"
            ]
            if len(args) != len(updated.args):
                return updated.with_changes(args=laid_out(args, updated.args))
        if method == "device" and not updated.args:
            return updated.func
        return updated

    def _isinstance(self, original: cst.Call, updated: cst.Call) -> Any:
        """Rewrite `isinstance` of a tuple that may be a spec, and of `ShardedDeviceArray`."""
        if len(updated.args) != 2:
            return updated
        value, kinds = (code_of(arg.value) for arg in updated.args)
        if kinds == "tuple" and self._facts.spec_classes:
            self.needs.modules.add("jax")
            return expression(f"isinstance({value}, (tuple, jax.P))")
        kind = self._canonical(original.args[1].value)
        if kind.endswith("ShardedDeviceArray") and re.fullmatch(r"[\w.]+", value):
            self.needs.modules.add("jax")
            code = f"isinstance({value}, jax.Array) and len({value}.sharding.device_set) > 1"
            inside = isinstance(
                self._resolver.parent(original),
                cst.BooleanOperation | cst.UnaryOperation | cst.Comparison | cst.ComparisonTarget,
            )
            return expression(f"({code})" if inside else code)
        return updated

    def _jit(self, updated: cst.Call, offset: int, by_position: Sequence[str]) -> cst.Call:
        """Return a call of `pjit`, after the first arguments, with the arguments of `jax.jit`."""
        by_name = bound(updated.args[offset:], by_position)
        if by_name is None:
            self._mark("pjit(*args): jax.jit takes keyword arguments after the function")
            return updated
        args = list(updated.args[:offset])
        for name, arg in by_name.items():
            if name in (*_TODAY, *_TODAY.values()):
                arg = arg.with_changes(value=self._shardings(arg.value))
            if name != "fun":
                arg = arg.with_changes(
                    keyword=cst.Name(_TODAY.get(name, name)),
                    equal=cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace("")),
                )
            args.append(arg)
        return updated.with_changes(args=args)

    def _shardings(self, node: cst.BaseExpression) -> cst.BaseExpression:
        """Return resources with P() in place of None, and with None in place of FROM_GDA."""
        if isinstance(node, cst.Name) and node.value in ("None", FROM_GDA, *self._facts.specs):
            if node.value == "None":
                self.needs.modules.add("jax")
                return expression("jax.P()")
            return node.with_changes(value="None") if node.value == FROM_GDA else node
        if isinstance(node, cst.Tuple | cst.List | cst.Dict):
            elements = [
                each.with_changes(value=self._shardings(each.value))
                if isinstance(each, cst.Element | cst.DictElement)
                else each
                for each in node.elements
            ]
            return node.with_changes(elements=elements)
        if isinstance(node, cst.IfExp):
            body, orelse = self._shardings(node.body), self._shardings(node.orelse)
            return node.with_changes(body=body, orelse=orelse)
        spec_classes = ("jax.P", *self._facts.spec_classes)
        if isinstance(node, cst.Call) and code_of(node.func) in spec_classes:
            return node
        self.needs.helpers.add("_none_is_replicated")
        return cst.Call(cst.Name("_none_is_replicated"), [cst.Arg(node)])

    def _partial_of_pjit(self, func: cst.BaseExpression) -> int | None:
        """Return the number of positional arguments bound by a variable `partial(pjit, ...)`."""
        value = self._resolver.value(func)
        if not isinstance(value, cst.Call) or not value.args:
            return None
        if self._resolver.name(value.func) != "functools.partial":
            return None
        if self._canonical(value.args[0].value) != PJIT:
            return None
        return sum(arg.keyword is None and not arg.star for arg in value.args[1:])

    def _mark_traced_mesh(self, function: cst.BaseExpression) -> None:
        """Mark `eval_shape` of a function that may enter a mesh, which JAX rejects in a trace."""
        value = self._resolver.value(function)
        is_wrapped = isinstance(value, cst.Call) and self._canonical(value.func) != PJIT
        if self._facts.enters_meshes and is_wrapped:
            self._mark(
                "jax.set_mesh can't be entered inside jax.eval_shape. Write: jax.eval_shape of the "
                "function that enters no mesh"
            )

    def _is_mesh(self, node: cst.BaseExpression) -> bool:
        if isinstance(node, cst.Call):
            return self._canonical(node.func) in _MESHES
        value = self._resolver.value(node)
        if isinstance(value, cst.Call) and self._canonical(value.func) in _MESHES:
            return True
        name = node.attr.value if isinstance(node, cst.Attribute) else code_of(node)
        return isinstance(node, cst.Name | cst.Attribute) and bool(_MESH_NAME.search(name))

    def leave_Dict(self, original_node: cst.Dict, updated_node: cst.Dict) -> cst.Dict:
        """Drop `_global_avals` from the keyword arguments of `lower`."""
        name = m.MatchIfTrue(lambda text: str(text).strip("\"'") == "_global_avals")
        dropped = m.DictElement(key=m.SimpleString(name))
        kept = [each for each in updated_node.elements if not m.matches(each, dropped)]
        if len(kept) == len(updated_node.elements):
            return updated_node
        return updated_node.with_changes(elements=kept)


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
    name = "jax.make_array_from_callback" if method else "jax.make_array_from_single_device_arrays"
    shape, mesh, end = (without_keyword(by_name[n]) for n in ("global_shape", "global_mesh", last))
    placed = mesh.with_changes(value=sharding(by_name["global_mesh"], by_name["mesh_axes"]))
    args = laid_out([shape, placed, end], call.args)
    return call.with_changes(func=expression(name), args=args)


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
