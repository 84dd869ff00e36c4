"""Rewriting of imports and statements, and comments on lines that need manual changes."""

import re
from collections.abc import Sequence
from typing import Any

import libcst as cst
from libcst import matchers as m
from libcst.helpers import get_full_name_for_node

from xlashard.legacy.migration.call_rewrites import code_of, expression
from xlashard.legacy.migration.expressions import ExpressionRewriter
from xlashard.legacy.migration.resolver import (
    ENV,
    Mark,
    Module,
    ProgramFacts,
    Rename,
    Resolver,
    canonical,
    rule_of,
)
from xlashard.legacy.modules import entries

COMMENT = "# xlashard: "
"""Prefix of comments on lines that need manual changes."""

_HAVE_LINES_ABOVE = (
    *(cst.SimpleStatementLine, cst.FunctionDef, cst.ClassDef, cst.If, cst.For, cst.While),
    *(cst.With, cst.Try, cst.TryStar, cst.Match),
)
_FLAGS = ("jax_array", "jax_parallel_functions_output_gda", "jax_pmap_no_rank_reduction")
_SPEC_NAME = re.compile(r"(^|_)(pspec|spec|axes)$")


class Rewriter(ExpressionRewriter):
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
        imports = ImportRewriter()
        used = self._facts.used.get(statement, ())
        rewrite = imports.plain_import if isinstance(statement, cst.Import) else imports.from_import
        statements = rewrite(statement, used)  # type: ignore[arg-type]
        if imports.binds_jax:
            self.needs.modules.add("jax")
        for mark in imports.marks:
            self._mark(mark)
        if statements is None:
            return updated_node
        if not statements and not imports.marks:
            return cst.RemoveFromParent()
        lines = [cst.SimpleStatementLine([each]) for each in statements or [cst.Pass()]]
        lines[0] = lines[0].with_changes(leading_lines=updated_node.leading_lines)
        lines[-1] = lines[-1].with_changes(trailing_whitespace=updated_node.trailing_whitespace)
        return lines[0] if len(lines) == 1 else cst.FlattenSentinel(lines)

    def _sets_flag(self, call: cst.BaseExpression) -> bool:
        if not isinstance(call, cst.Call) or not call.args:
            return False
        flag = call.args[0].value
        return (
            self._canonical(call.func) == "jax.config.update"
            and isinstance(flag, cst.SimpleString)
            and flag.evaluated_value in _FLAGS
        )

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
        taken = updated_node if test.value == "True" else updated_node.orelse
        if isinstance(taken, cst.If) and test.value == "False":
            return taken
        if test.value not in ("True", "False"):
            return updated_node
        if taken is None:
            return cst.RemoveFromParent()
        lines = taken.body.body if isinstance(taken.body, cst.IndentedBlock) else None
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

    def leave_Dict(self, original_node: cst.Dict, updated_node: cst.Dict) -> cst.Dict:
        """Drop `_global_avals` from the keyword arguments of `lower`."""
        name = m.MatchIfTrue(lambda text: str(text).strip("\"'") == "_global_avals")
        dropped = m.DictElement(key=m.SimpleString(name))
        kept = [each for each in updated_node.elements if not m.matches(each, dropped)]
        if len(kept) == len(updated_node.elements):
            return updated_node
        return updated_node.with_changes(elements=kept)


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


_ERA_PACKAGES = ("jax.experimental.gda_serialization",)


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


class ImportRewriter:
    """Rewriter of the aliases of one import.

    Attributes:
        marks: Comments on unused imports that need manual changes.
        binds_jax: True if the import bound the name `jax` and no longer does.
    """

    def __init__(self) -> None:
        self.marks: list[str] = []
        self.binds_jax = False

    def from_import(
        self, node: cst.ImportFrom, used: Sequence[str]
    ) -> list[cst.BaseSmallStatement] | None:
        """Return today's statements for `from module import ...`; None to keep it.

        Args:
            node: The import.
            used: The local names that the program uses.
        """
        module = get_full_name_for_node(node.module) if node.module is not None else None
        if module is None or node.relative or isinstance(node.names, cst.ImportStar):
            return None
        kept: list[cst.ImportAlias] = []
        added: list[cst.BaseSmallStatement] = []
        for alias in node.names:
            name = f"{module}.{get_full_name_for_node(alias.name)}"
            local = alias.evaluated_alias or alias.evaluated_name
            changed = self._today(name, local, local in used)
            if changed is None:
                kept.append(alias)
            else:
                added += changed
        return _with_names(node, node.names, kept, _merged(added))

    def plain_import(
        self, node: cst.Import, used: Sequence[str]
    ) -> list[cst.BaseSmallStatement] | None:
        """Return today's statements for `import module`; None to keep it.

        Args:
            node: The import.
            used: The local names that the program uses.
        """
        kept: list[cst.ImportAlias] = []
        added: list[cst.BaseSmallStatement] = []
        for alias in node.names:
            name = alias.evaluated_name
            local = alias.evaluated_alias
            rule = rule_of(name)
            if isinstance(rule, Module):
                plain = cst.Import([cst.ImportAlias(cst.parse_expression(rule.to))])  # type: ignore[arg-type]
                added.append(import_of(rule.to, local) if local else plain)
            elif is_lost_module(name) or name in _ERA_PACKAGES:
                self.binds_jax |= local is None
            else:
                kept.append(alias)
        return _with_names(node, node.names, kept, added)

    def _today(self, name: str, local: str, is_used: bool) -> list[cst.BaseSmallStatement] | None:
        rule = rule_of(name)
        match rule:
            case None:
                return [] if is_lost_module(name) else None
            case Module(to):
                return [import_of(to, local)]
            case Rename(to, inline) if not (inline and is_used):
                return [import_of(to, local)]
            case Mark(text) if not is_used:
                self.marks.append(text)
        return []


def _with_names(
    node: cst.Import | cst.ImportFrom,
    names: Sequence[cst.ImportAlias],
    kept: list[cst.ImportAlias],
    added: list[cst.BaseSmallStatement],
) -> list[cst.BaseSmallStatement] | None:
    """Return an import of the kept names and the added statements; None if all names are kept."""
    if len(kept) == len(names):
        return None
    if not kept:
        return added
    kept[-1] = kept[-1].with_changes(comma=names[-1].comma)
    return [node.with_changes(names=kept), *added]


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
