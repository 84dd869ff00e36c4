"""Rewriting of names, attribute chains and calls in expressions."""

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import libcst as cst

from xlashard.legacy.migration.call_rewrites import (
    FROM_GDA,
    PJIT_ARGUMENTS,
    Needs,
    array_call,
    code_of,
    deserialize_call,
    expression,
    jit_arguments,
    laid_out,
    shard_call,
    shardings,
)
from xlashard.legacy.migration.resolver import (
    GDA,
    PJIT,
    Expression,
    Helper,
    Mark,
    Module,
    ProgramFacts,
    Rename,
    Resolver,
    Rule,
    canonical,
    chain,
    rule_of,
)

_SHARDS = {
    "jax.experimental.global_device_array.get_shard_indices": "devices_indices_map",
    "jax.experimental.global_device_array.get_shard_shape": "shard_shape",
}
_MESHES = (
    "jax.sharding.Mesh",
    "jax.experimental.maps.Mesh",
    "jax.experimental.maps.mesh",
    "jax.interpreters.pxla.Mesh",
)
_MESH_NAME = re.compile(r"(^|_)mesh$")
_ATTRIBUTES = {"local_shards": "addressable_shards", "local_data": "addressable_data"}


class ExpressionRewriter(cst.CSTTransformer):
    """Transformer that rewrites expressions.

    Args:
        resolver: Resolves the program's names.
        facts: The facts of the program.
    """

    def __init__(self, resolver: Resolver, facts: ProgramFacts) -> None:
        super().__init__()
        self.needs = Needs()
        self._resolver = resolver
        self._facts = facts
        self._marks: list[list[str]] = [[]]

    # Names and chains of attributes.

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> Any:
        """Replace a name that was imported as a removed one."""
        return self._replaced(original_node, updated_node)

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> Any:
        """Replace an attribute chain that resolves to a removed name."""
        changed = self._replaced(original_node, updated_node)
        name = original_node.attr.value
        if changed is not updated_node or self._resolver.name(original_node):
            return changed
        if name in _ATTRIBUTES:
            return updated_node.with_changes(attr=cst.Name(_ATTRIBUTES[name]))
        if name == "mesh_axes" and self._facts.reads_mesh_axes:
            return expression(f"{code_of(updated_node.value)}.sharding.spec")
        if name == "device_buffers":
            return expression(f"[s.data for s in {code_of(updated_node.value)}.addressable_shards]")
        if name == "device_buffer":
            return expression(f"{code_of(updated_node.value)}.addressable_data(0)")
        return updated_node

    def _replaced(self, original: Any, updated: Any) -> Any:
        parent = self._resolver.parent(original)
        if isinstance(parent, cst.Attribute) and parent.value is original:
            return updated
        full = self._resolver.name(original)
        root, attributes = chain(original)
        if full is None or root is None:
            return updated
        if isinstance(parent, cst.Call) and parent.func is original and full in _SHARDS:
            return updated
        is_variable = self._resolver.value(root) is not None
        for kept in range(len(attributes), -1 + is_variable, -1):
            name = full
            for attribute in reversed(attributes[kept:]):
                name = name.removesuffix(f".{attribute}")
            rule = rule_of(name)
            served = kept == 1 and root.value != "jax" and _is_served(name, rule)
            if rule is not None and not served:
                return self._by_rule(rule, original, updated, attributes[kept:])
        return updated

    def _by_rule(self, rule: Rule, original: cst.CSTNode, updated: Any, after: list[str]) -> Any:
        rest = "".join(f".{attribute}" for attribute in after)
        kept = len(chain(original)[1]) - len(after)
        match rule:
            case Mark(text):
                self._mark(text)
                return updated
            case Helper(name):
                self.needs.helpers.add(name)
                return _in_place(updated, f"{name}{rest}")
            case Expression(code):
                if code == "None":
                    code = FROM_GDA
                    self._mark_outside_of_pjit(original)
                self._import_for(code)
                return _in_place(updated, f"{code}{rest}")
            case Rename(to, inline) if inline or isinstance(updated, cst.Attribute):
                if not inline and not kept:
                    return updated
                self._import_for(to)
                return _in_place(updated, f"{to}{rest}")
            case Module(to) if kept > 0:
                self.needs.modules.add(to)
                return _in_place(updated, f"{to}{rest}")
        return updated

    def _import_for(self, code: str) -> None:
        module = code.rpartition(".")[0]
        if module.startswith(("jax.extend", "jax.example_libraries")) or "jax" not in code:
            if module and "(" not in module and "[" not in module:
                self.needs.modules.add(module)
        else:
            self.needs.modules.add("jax")

    # Calls.

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
            made = array_call(updated_node, known[len(GDA) + 1 :], self.needs)
            if made is None:
                self._mark(f"{known} is gone. Write: jax.make_array_from_callback(...)")
            return made or updated_node
        if known == "jax.eval_shape" and first is not None:
            self._mark_traced_mesh(first)
        if known.endswith(".async_deserialize") and first is not None and self._is_mesh(first):
            return deserialize_call(updated_node)
        if known in _SHARDS:
            return shard_call(updated_node, _SHARDS[known], self.needs) or updated_node
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
        rewrite = partial(shardings, self._facts, self.needs)
        args = jit_arguments(updated.args[offset:], by_position, rewrite)
        if args is None:
            self._mark("pjit(*args): jax.jit takes keyword arguments after the function")
            return updated
        return updated.with_changes(args=[*updated.args[:offset], *args])

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

    def _mark_outside_of_pjit(self, node: cst.CSTNode | None) -> None:
        """Mark FROM_GDA outside of the resources of a `pjit` call."""
        while node is not None and not isinstance(node, cst.BaseStatement | cst.BaseSmallStatement):
            if isinstance(node, cst.Call):
                first = node.args[0].value if node.args else node.func
                if PJIT in (self._canonical(node.func), self._canonical(first)):
                    return
            node = self._resolver.parent(node)
        self._mark("FROM_GDA is gone. Write: None, in in_shardings of jax.jit")

    def _mark_traced_mesh(self, function: cst.BaseExpression) -> None:
        """Mark `eval_shape` of a function that may enter a mesh, which JAX rejects in a trace."""
        made = self._resolver.value(function)
        is_wrapped = isinstance(made, cst.Call) and self._canonical(made.func) != PJIT
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

    def _canonical(self, node: cst.CSTNode) -> str:
        return canonical(self._resolver.name(node) or "")

    def _mark(self, text: str) -> None:
        if text not in self._marks[-1]:
            self._marks[-1].append(text)


def _is_served(name: str, rule: Rule | None) -> bool:
    """Return True if the replacement of a name's module has the name too."""
    module, _, last = name.rpartition(".")
    today = rule_of(module)
    return isinstance(today, Module) and rule == Rename(f"{today.to}.{last}")


def _in_place(updated: Any, code: str) -> cst.BaseExpression:
    """Return an expression with the parentheses of the one that it replaces."""
    new = expression(code)
    return new.with_changes(lpar=updated.lpar, rpar=updated.rpar) if updated.lpar else new
