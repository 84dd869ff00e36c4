"""Rewriting of imports, names and attribute chains."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
from libcst.helpers import get_full_name_for_node

from xlashard.legacy.migration.inserted_functions import functions_with_callees
from xlashard.legacy.migration.resolver import (
    CONSTRAINT,
    ENV,
    GDA,
    GDA_MODULE,
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
from xlashard.legacy.modules import entries

FROM_GDA = "_from_gda_"
"""Temporary name of FROM_GDA until the enclosing resources are rewritten."""

SHARD_METHODS = {
    f"{GDA_MODULE}.get_shard_indices": "devices_indices_map",
    f"{GDA_MODULE}.get_shard_shape": "shard_shape",
}
"""Methods of shardings for functions of a shape, mesh and axes."""

HELD = {
    PJIT: "_pjit",
    CONSTRAINT: "_with_sharding_constraint",
    f"{GDA}.from_callback": "_array_from_callback",
    f"{GDA_MODULE}.get_shard_indices": "_get_shard_indices",
    f"{GDA_MODULE}.get_shard_shape": "_get_shard_shape",
}
"""Functions whose calls are rewritten, and the helpers where they are passed on or kept."""

TODAYS_ATTRIBUTES = {
    "local_shards": "{}.addressable_shards",
    "local_data": "{}.addressable_data",
    "mesh_axes": "{}.sharding.spec",
    "device_buffers": "[s.data for s in {}.addressable_shards]",
    "device_buffer": "{}.addressable_data(0)",
}
_ARRAY_MAKERS = (
    *("jax.numpy.", "jax.random.", "jax.lax.", "jax.nn.", "jax.device_put", "jax.make_array"),
    GDA,
)
_ERA_PACKAGES = ("jax.experimental.gda_serialization",)
_FLAGS = ("jax_array", "jax_parallel_functions_output_gda", "jax_pmap_no_rank_reduction")


@dataclass
class Needs:
    """Imports and helper functions that a migrated program needs.

    Attributes:
        modules: Modules to import, by full name.
        helpers: Helper functions to insert, with their names in the program.
        taken: The program's own names.
        functions: The code of the program's own functions.
    """

    modules: set[str] = field(default_factory=set)
    helpers: dict[str, str] = field(default_factory=dict)
    taken: Collection[str] = ()
    functions: Collection[str] = ()

    def helper(self, name: str) -> str:
        """Require a helper function, and return its name in the program.

        Args:
            name: The function's name.
        """
        return self.helpers.setdefault(name, self._free(name))

    def sources(self) -> list[str]:
        """Return the source code of the required helper functions and their callees."""
        sources = functions_with_callees(self.helpers)
        for name in sources:
            self.helper(name)
        missing = [source for source in sources.values() if source.strip() not in self.functions]
        renamed = {name: free for name, free in self.helpers.items() if name != free}
        return [
            re.sub(r"\b_\w+\b", lambda match: renamed.get(match[0], match[0]), source)
            for source in missing
        ]

    def _free(self, name: str) -> str:
        # An earlier migration may have inserted it.
        source = functions_with_callees([name])[name]
        while name in self.taken and source.strip() not in self.functions:
            name += "_"
        return name


def code_of(node: cst.CSTNode) -> str:
    """Return the text of a node."""
    return cst.Module([]).code_for_node(node)


def expression(code: str) -> cst.BaseExpression:
    """Parse an expression."""
    return cst.parse_expression(code)


class NameRewriter(cst.CSTTransformer):
    """Transformer that rewrites imports, names and attribute chains.

    Args:
        resolver: Resolves the program's names.
        facts: The facts of the program.
    """

    def __init__(self, resolver: Resolver, facts: ProgramFacts) -> None:
        super().__init__()
        self.needs = Needs(taken=facts.names, functions=facts.functions)
        self._resolver = resolver
        self._facts = facts
        self._marks: list[list[str]] = [[]]

    # Imports.

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> Any:
        """Rewrite imports, and remove settings of removed flags."""
        if len(original_node.body) != 1:
            return updated_node
        (statement,) = original_node.body
        if isinstance(statement, cst.Expr) and self._sets_flag(statement.value):
            return cst.RemoveFromParent()
        if not isinstance(statement, cst.Import | cst.ImportFrom):
            return updated_node
        statements = self._todays_import(statement)
        if statements is None:
            return updated_node
        if not statements and not self._marks[-1]:
            return cst.RemoveFromParent()
        lines = [cst.SimpleStatementLine([each]) for each in statements or [cst.Pass()]]
        lines[0] = lines[0].with_changes(leading_lines=updated_node.leading_lines)
        lines[-1] = lines[-1].with_changes(trailing_whitespace=updated_node.trailing_whitespace)
        return lines[0] if len(lines) == 1 else cst.FlattenSentinel(lines)

    def _todays_import(
        self, node: cst.Import | cst.ImportFrom
    ) -> list[cst.BaseSmallStatement] | None:
        """Return today's statements for an import; None to keep it."""
        if isinstance(node.names, cst.ImportStar):
            self._mark_lost_module(node)
            return None
        module = None
        if isinstance(node, cst.ImportFrom):
            if node.module is None or node.relative:
                return None
            module = get_full_name_for_node(node.module)
        kept: list[cst.ImportAlias] = []
        added: list[cst.BaseSmallStatement] = []
        used = self._facts.used.get(node, ())
        for alias in node.names:
            if module is None:
                changed = self._todays_module(alias)
            else:
                changed = self._todays_member(module, alias, used)
            if changed is None:
                kept.append(alias)
            else:
                added += changed
        if len(kept) == len(node.names):
            return None
        if module is not None:
            added = _merged(added)
        if not kept:
            return added
        kept[-1] = kept[-1].with_changes(comma=node.names[-1].comma)
        return [node.with_changes(names=kept), *added]

    def _mark_lost_module(self, node: cst.Import | cst.ImportFrom) -> None:
        if isinstance(node, cst.ImportFrom) and node.module and not node.relative:
            module = get_full_name_for_node(node.module)
            if module and is_lost_module(module):
                self._mark(f"{module} is gone: import the names that the program reads")

    def _todays_module(self, alias: cst.ImportAlias) -> list[cst.BaseSmallStatement] | None:
        """Return today's statements for `import module`; None to keep it."""
        name, local = alias.evaluated_name, alias.evaluated_alias
        rule = rule_of(name)
        if isinstance(rule, Module):
            plain = cst.Import([cst.ImportAlias(cst.parse_expression(rule.to))])  # type: ignore[arg-type]
            return [import_of(rule.to, local) if local else plain]
        if not is_lost_module(name) and name not in _ERA_PACKAGES:
            return None
        if local is None:
            # The import bound the name `jax` and no longer does.
            self.needs.modules.add("jax")
        return []

    def _todays_member(
        self, module: str, alias: cst.ImportAlias, used: Sequence[str]
    ) -> list[cst.BaseSmallStatement] | None:
        """Return today's statements for `from module import name`; None to keep it."""
        name = f"{module}.{alias.evaluated_name}"
        local = alias.evaluated_alias or alias.evaluated_name
        match rule_of(name):
            case None:
                return [] if is_lost_module(name) else None
            case Module(to):
                return [import_of(to, local)]
            case Rename(to, inline) if not (inline and local in used):
                return [import_of(to, local)]
            case Mark(text) if local not in used:
                self._mark(text)
            case Helper(helper) if local not in used:
                self._mark(f"{name} is gone, and is not used here: does another file import it?")
                return [import_of("jax.jit", local)] if helper == "_pjit" else []
        return []

    def _sets_flag(self, call: cst.BaseExpression) -> bool:
        if not isinstance(call, cst.Call) or not call.args:
            return False
        flag = call.args[0].value
        is_flag = (
            self._canonical(call.func) == "jax.config.update"
            and isinstance(flag, cst.SimpleString)
            and flag.evaluated_value in _FLAGS
        )
        if is_flag and code_of(call.args[-1].value) != "True":
            self._mark(f"{code_of(flag)} is always on: remove this line if it turns it off")
            return False
        return is_flag

    # Names and chains of attributes.

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> Any:
        """Replace a name that was imported as a removed one."""
        return self._replaced(original_node, updated_node)

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> Any:
        """Replace an attribute chain that resolves to a removed name."""
        changed = self._replaced(original_node, updated_node)
        if changed is not updated_node or self._resolver.name(original_node):
            return changed
        name = original_node.attr.value
        if not self._facts.imports_jax or self._resolver.is_target(original_node):
            return updated_node
        if name == "physical_mesh":
            self._mark("The mesh in force has no physical_mesh. Write: the mesh itself")
        if name == "mesh_axes" and not self._facts.reads_mesh_axes:
            return updated_node
        if name in TODAYS_ATTRIBUTES:
            return self._array_attribute(name, original_node.value, updated_node)
        return updated_node

    def _array_attribute(
        self, name: str, owner: cst.BaseExpression, updated: cst.Attribute
    ) -> cst.BaseExpression:
        """Return an attribute that only arrays lack: unless surely an array's, by a helper."""
        if self._is_own(owner):
            return updated
        if self._is_array(owner):
            return expression(TODAYS_ATTRIBUTES[name].format(code_of(updated.value)))
        return self._old_attribute(updated.value, name)

    def _old_attribute(self, owner: cst.BaseExpression, name: str) -> cst.BaseExpression:
        return expression(f'{self._helper("_old_attribute")}({code_of(owner)}, "{name}")')

    def _is_array(self, node: cst.BaseExpression | None) -> bool:
        """Return True if an expression is surely an array."""
        if isinstance(node, cst.Name):
            node = self._resolver.value(node)
        if isinstance(node, cst.Subscript):
            buffers = node.value
            return isinstance(buffers, cst.Attribute) and buffers.attr.value == "device_buffers"
        return isinstance(node, cst.Call) and self._canonical(node.func).startswith(_ARRAY_MAKERS)

    def _is_own(self, node: cst.BaseExpression) -> bool:
        """Return True if an expression is surely an object of one of the program's classes."""
        value = self._resolver.value(node) if isinstance(node, cst.Name) else node
        if isinstance(value, cst.Call):
            return isinstance(value.func, cst.Name) and value.func.value in self._facts.classes
        return isinstance(node, cst.Name) and node.value == "self"

    def _replaced(self, original: Any, updated: Any) -> Any:
        parent = self._resolver.parent(original)
        if isinstance(parent, cst.Attribute) and parent.value is original:
            return updated
        full = self._resolver.name(original)
        root, attributes = chain(original)
        if full is None or root is None:
            return updated
        is_variable = self._resolver.value(root) is not None
        if is_variable and self._canonical(root).startswith(ENV):
            # The variable is the mesh now.
            rest = [name for name in attributes if name != "physical_mesh"]
            return _in_place(updated, ".".join([root.value, *rest])) if attributes else updated
        if canonical(full) in HELD and not (is_variable and not attributes):
            if isinstance(parent, cst.Call) and parent.func is original:
                # `leave_Call` rewrites it with its arguments.
                return updated
            return _in_place(updated, self._helper(HELD[canonical(full)]))
        if canonical(full) == GDA and not self._is_type(original):
            self._mark("GlobalDeviceArray is jax.Array, which has no constructors of its kind")
        for kept in range(len(attributes), -1 + is_variable, -1):
            name = full
            for attribute in reversed(attributes[kept:]):
                name = name.removesuffix(f".{attribute}")
            rule = rule_of(name)
            served = kept == 1 and root.value != "jax" and _is_served(name, rule)
            if rule is not None and not served:
                return self._by_rule(rule, original, updated, attributes[kept:])
        return updated

    def _is_type(self, node: cst.CSTNode) -> bool:
        """Return True for a class in an annotation, a tuple or call of `isinstance`, or a call."""
        parent = self._resolver.parent(node)
        while isinstance(
            parent,
            cst.Arg
            | cst.Element
            | cst.Tuple
            | cst.BinaryOperation
            | cst.Subscript
            | cst.Index
            | cst.SubscriptElement,
        ):
            node, parent = parent, self._resolver.parent(parent)
        if isinstance(parent, cst.Call):
            return parent.func is node or code_of(parent.func) in ("isinstance", "issubclass")
        return isinstance(parent, cst.Annotation | cst.Comparison | cst.ClassDef)

    def _helper(self, name: str) -> str:
        return self.needs.helper(name)

    def _by_rule(self, rule: Rule, original: cst.CSTNode, updated: Any, after: list[str]) -> Any:
        rest = "".join(f".{attribute}" for attribute in after)
        kept = len(chain(original)[1]) - len(after)
        match rule:
            case Mark(text):
                self._mark(text)
                return updated
            case Helper(name, suffix):
                code = self._helper(name) + suffix
            case Expression("None"):
                code = FROM_GDA
                self._mark_outside_of_pjit(original)
            case Expression(code):
                self._import_for(code)
            case Rename(code, inline) if inline or (kept and isinstance(updated, cst.Attribute)):
                self._import_for(code)
            case Module(code) if kept:
                self.needs.modules.add(code)
            case _:
                return updated
        return _in_place(updated, f"{code}{rest}")

    def _import_for(self, code: str) -> None:
        module = code.rpartition(".")[0]
        if module.startswith(("jax.extend", "jax.example_libraries")) or "jax" not in code:
            if module and "(" not in module and "[" not in module:
                self.needs.modules.add(module)
        else:
            self.needs.modules.add("jax")

    def _mark_outside_of_pjit(self, node: cst.CSTNode | None) -> None:
        """Mark FROM_GDA outside of the resources of a `pjit` call."""
        while node is not None and not isinstance(node, cst.BaseStatement | cst.BaseSmallStatement):
            if isinstance(node, cst.Call):
                first = node.args[0].value if node.args else node.func
                if PJIT in (self._canonical(node.func), self._canonical(first)):
                    return
            node = self._resolver.parent(node)
        self._mark("FROM_GDA is gone. Write: None, in in_shardings of jax.jit")

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


def is_lost_module(name: str) -> bool:
    """Return True if a removed module has no single replacement.

    Args:
        name: The full name.
    """
    entry = entries().get(name) or entries().get(canonical(name))
    return entry is not None and entry.is_module and not entry.stays


def import_of(name: str, local: str) -> cst.BaseSmallStatement:
    """Return the statement that imports a full name under a local one.

    Args:
        name: The full name.
        local: The local name.
    """
    parent, _, last = name.rpartition(".")
    renamed = "" if local == last else f" as {local}"
    code = f"from {parent} import {last}{renamed}" if parent else f"import {last}{renamed}"
    (statement,) = cst.ensure_type(cst.parse_statement(code), cst.SimpleStatementLine).body
    return statement


def _merged(imports: Sequence[cst.BaseSmallStatement]) -> list[cst.BaseSmallStatement]:
    """Merge imports to one statement per module."""
    by_module: dict[str, list[str]] = {}
    for each in imports:
        before, _, names = cst.Module([]).code_for_node(each).partition("import ")
        by_module.setdefault(before, []).append(names)
    merged = []
    for before, names in by_module.items():
        code = f"{before}import {', '.join(sorted(names, key=str.lower))}"
        merged += cst.ensure_type(cst.parse_statement(code), cst.SimpleStatementLine).body
    return merged
