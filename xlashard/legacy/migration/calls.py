"""Rewriting of calls to the arguments of today's functions."""

import re
from collections.abc import Sequence
from typing import Any

import libcst as cst
from libcst import matchers as m

from xlashard.legacy.migration.names import (
    FROM_GDA,
    HELD,
    SHARD_METHODS,
    TODAYS_ATTRIBUTES,
    NameRewriter,
    Needs,
    code_of,
    expression,
)
from xlashard.legacy.migration.resolver import CONSTRAINT, GDA, PJIT, canonical

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


class CallRewriter(NameRewriter):
    """Transformer that rewrites calls, and the names in them."""

    def leave_SimpleString(
        self, original_node: cst.SimpleString, updated_node: cst.SimpleString
    ) -> cst.SimpleString:
        """Replace the name of the `jit` primitive by today's, where it is compared."""
        old = re.fullmatch(r"([\"'])(pjit|xla_call)\1", updated_node.value)
        if not old or not self._facts.walks_jaxprs:
            return updated_node
        parent = self._resolver.parent(original_node)
        while isinstance(parent, cst.Element | cst.Tuple | cst.List | cst.Set):
            parent = self._resolver.parent(parent)
        if not isinstance(parent, cst.Comparison | cst.ComparisonTarget):
            self._mark('The primitive of jax.jit is named "jit" today')
            return updated_node
        return updated_node.with_changes(value=f"{old[1]}jit{old[1]}")

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> Any:
        """Rewrite a call whose arguments have changed."""
        func = original_node.func
        name = self._resolver.name(func) or ""
        first = original_node.args[0].value if original_node.args else None
        is_decorator = isinstance(self._resolver.parent(original_node), cst.Decorator)
        if name == "functools.partial" and first and is_decorator:
            return self._partial(first, updated_node)
        known = canonical(name)
        if known in HELD and not self._is_held(func):
            called = self._call(known, updated_node)
            held = expression(self._helper(HELD[known])) if called is None else None
            return called or updated_node.with_changes(func=held)
        if known == GDA and not self._is_held(func):
            return array_call(updated_node, "", self.needs) or updated_node.with_changes(
                func=expression(self._helper("_array_from_buffers"))
            )
        if known.endswith(".async_deserialize") and first is not None:
            return self._deserialize(first, updated_node)
        if isinstance(func, cst.Attribute) and not name:
            return self._method_call(func, updated_node)
        if isinstance(func, cst.Name) and func.value == "isinstance":
            return self._isinstance(original_node, updated_node)
        if isinstance(func, cst.Name) and func.value in ("getattr", "hasattr"):
            self._mark_attribute_name(original_node)
        return updated_node

    def _is_held(self, func: cst.BaseExpression) -> bool:
        """Return True if a variable of the program is called, which may be another function."""
        return isinstance(func, cst.Name) and self._resolver.value(func) is not None

    def _call(self, known: str, updated: cst.Call) -> cst.Call | None:
        """Return today's call of a function of `HELD`; None if its arguments are not known."""
        if known == PJIT:
            return self._jit(updated, 0)
        if known == CONSTRAINT:
            return self._constraint(updated)
        if known in SHARD_METHODS:
            return shard_call(updated, SHARD_METHODS[known], self.needs)
        return array_call(updated, "from_callback", self.needs)

    def _constraint(self, updated: cst.Call) -> cst.Call | None:
        by_name = bound(updated.args, ("x", "axis_resources"))
        if by_name is None:
            return None
        resources = by_name.get("axis_resources")
        if resources is not None and resources.keyword is not None:
            by_name["axis_resources"] = resources.with_changes(keyword=cst.Name("shardings"))
        func = self._todays_func(updated.func, "jax.lax.with_sharding_constraint")
        return updated.with_changes(func=func, args=list(by_name.values()))

    def _todays_func(self, func: cst.BaseExpression, today: str) -> cst.BaseExpression:
        """Return today's function, under the local name that its import keeps."""
        if isinstance(func, cst.Name):
            return func
        self.needs.modules.add("jax")
        return expression(today)

    def _partial(self, first: cst.BaseExpression, updated: cst.Call) -> cst.Call:
        """Rewrite `@partial(pjit, ...)`."""
        if self._canonical(first) != PJIT or self._is_held(first):
            return updated
        return self._jit(updated, 1) or updated

    def _deserialize(self, first: cst.BaseExpression, updated: cst.Call) -> cst.Call:
        if self._is_mesh(first):
            return deserialize_call(updated)
        name = code_of(first.func if isinstance(first, cst.Call) else first)
        if name.lower().endswith("sharding") or any(arg.star for arg in updated.args):
            return updated
        return updated.with_changes(func=expression(self._helper("_async_deserialize")))

    def _mark_attribute_name(self, call: cst.Call) -> None:
        name = call.args[1].value if len(call.args) > 1 else None
        if isinstance(name, cst.SimpleString) and self._facts.imports_jax:
            today = TODAYS_ATTRIBUTES.get(str(name.evaluated_value))
            if today:
                self._mark(f"Arrays have no {name.evaluated_value}. Write: {today.format('x')}")

    def _method_call(self, func: cst.Attribute, updated: cst.Call) -> Any:
        method = func.attr.value
        if method == "lower" and "_global_avals" not in self._facts.parameters:
            args = [
                arg
                for arg in updated.args
                if arg.keyword is None or arg.keyword.value != "_global_avals"
            ]
            if len(args) != len(updated.args):
                return updated.with_changes(args=laid_out(args, updated.args))
        if method == "device" and not updated.args and self._facts.imports_jax:
            if self._is_array(func.value):
                return updated.func
            if not self._is_own(func.value) and isinstance(updated.func, cst.Attribute):
                return updated.with_changes(func=self._old_attribute(updated.func.value, "device"))
        return updated

    def _isinstance(self, original: cst.Call, updated: cst.Call) -> Any:
        """Rewrite `isinstance` of a tuple that may be a spec, and of `ShardedDeviceArray`."""
        if len(updated.args) != 2:
            return updated
        value, kinds = (code_of(arg.value) for arg in updated.args)
        names = re.findall(r"[\w.]+", kinds)
        if "tuple" in names and "jax.P" not in names and self._facts.uses_specs:
            self.needs.modules.add("jax")
            listed = kinds if kinds == "tuple" else kinds.strip("() ").rstrip(", ")
            return expression(f"isinstance({value}, ({listed}, jax.P))")
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

    def _jit(self, updated: cst.Call, offset: int) -> cst.Call | None:
        """Return a call of `pjit`, after the first arguments, with the arguments of `jax.jit`."""
        by_name = bound(updated.args[offset:], PJIT_ARGUMENTS)
        if by_name is None:
            return None
        args = list(updated.args[:offset])
        has_specs = False
        for name, arg in by_name.items():
            if name in (*_TODAY, *_TODAY.values()):
                arg = arg.with_changes(value=self._shardings(arg.value))
                has_specs |= code_of(arg.value) != "None"
            if name != "fun":
                arg = arg.with_changes(
                    keyword=cst.Name(_TODAY.get(name, name)),
                    equal=cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace("")),
                )
            args.append(arg)
        self.needs.modules.add("jax")
        func = expression(self._helper("_jit_on_mesh") if has_specs else "jax.jit")
        if offset:
            args[0] = args[0].with_changes(value=func)
            return updated.with_changes(args=args)
        return updated.with_changes(func=func, args=args)

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
        return cst.Call(cst.Name(self._helper("_none_is_replicated")), [cst.Arg(node)])

    def _is_mesh(self, node: cst.BaseExpression) -> bool:
        if isinstance(node, cst.Call):
            return self._canonical(node.func) in _MESHES
        value = self._resolver.value(node)
        return isinstance(value, cst.Call) and self._canonical(value.func) in _MESHES

    def leave_Dict(self, original_node: cst.Dict, updated_node: cst.Dict) -> cst.Dict:
        """Drop `_global_avals` from the keyword arguments of `lower`."""
        name = m.MatchIfTrue(lambda text: str(text).strip("\"'") == "_global_avals")
        dropped = m.DictElement(key=m.SimpleString(name))
        kept = [each for each in updated_node.elements if not m.matches(each, dropped)]
        if len(kept) == len(updated_node.elements) or "_global_avals" in self._facts.parameters:
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
