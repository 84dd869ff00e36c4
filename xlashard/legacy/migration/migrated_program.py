"""`migrate`: rewriting of statements, and of a whole program with the functions that it needs."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import libcst as cst
from libcst import matchers as m
from libcst.metadata import MetadataWrapper

from xlashard.legacy.migration.calls import CallRewriter
from xlashard.legacy.migration.inserted_functions import modules_read_by
from xlashard.legacy.migration.names import FROM_GDA, Needs, code_of
from xlashard.legacy.migration.resolver import ENV, ProgramFacts, Resolver, facts_of

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
    # Nothing above the first import of JAX changes: its position stays.
    first = _place_of_imports(wrapper.module.body)
    complete = _with_needs(cst.ensure_type(module, cst.Module), rewriter.needs, first)
    return Migrated(complete.code, rewriter.marked)


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

    def leave_Assign(self, original_node: cst.Assign, updated_node: cst.Assign) -> cst.Assign:
        """Mark assignments of the mesh in force."""
        for target in original_node.targets:
            if isinstance(target.target, cst.Attribute) and self._canonical(target.target) == ENV:
                self._mark("The mesh in force can't be assigned. Write: with mesh: ...")
                return original_node
        return updated_node

    # Flags and comparisons.

    def leave_Comparison(
        self, original_node: cst.Comparison, updated_node: cst.Comparison
    ) -> cst.BaseExpression:
        """Rewrite comparisons of specs with tuples of axis names."""
        if len(original_node.comparisons) != 1 or not self._facts.uses_specs:
            return updated_node
        (target,) = updated_node.comparisons
        if not isinstance(target.operator, cst.Equal | cst.NotEqual):
            return updated_node
        left, right = updated_node.left, target.comparator
        if _is_axes(right) and self._may_be_spec(original_node.left, right):
            return updated_node.with_changes(left=self._make_tuple(original_node.left, left))
        old_right = original_node.comparisons[0].comparator
        if _is_axes(left) and self._may_be_spec(old_right, left):
            target = target.with_changes(comparator=self._make_tuple(old_right, right))
            return updated_node.with_changes(comparisons=[target])
        return updated_node

    def _may_be_spec(self, node: cst.BaseExpression, axes: cst.BaseExpression) -> bool:
        name = node.attr.value if isinstance(node, cst.Attribute) else code_of(node)
        has_axes = code_of(axes) != "()" and name not in ("axis_names", "shape")
        return self._is_spec(node) or has_axes or bool(_SPEC_NAME.search(name))

    def _is_spec(self, node: cst.BaseExpression) -> bool:
        func = node.func if isinstance(node, cst.Call) else None
        names = self._facts.specs if func is None else self._facts.spec_classes
        return code_of(node if func is None else func) in names

    def _make_tuple(self, old: cst.BaseExpression, new: cst.BaseExpression) -> cst.BaseExpression:
        """Return an expression that is a tuple where the old one is a spec."""
        if isinstance(old, cst.Tuple) or re.match(r"(_as_)?tuple_*\(", code_of(new)):
            return new
        func = "tuple" if self._is_spec(old) else self._helper("_as_tuple")
        return cst.Call(cst.Name(func), [cst.Arg(new.with_changes(lpar=[], rpar=[]))])

    def leave_BooleanOperation(
        self, original_node: cst.BooleanOperation, updated_node: cst.BooleanOperation
    ) -> cst.BaseExpression:
        """Fold flags with a constant value."""
        absorbing = "False" if isinstance(updated_node.operator, cst.And) else "True"
        left, right = updated_node.left, updated_node.right
        if self._is_folded(original_node.left, left):
            return left if code_of(left) == absorbing else right
        is_test = isinstance(
            self._resolver.parent(original_node),
            cst.If | cst.IfExp | cst.While | cst.Assert | cst.UnaryOperation | cst.BooleanOperation,
        )
        # The value of `x and True` is not x's, and x is evaluated before the flag.
        if not is_test or not self._is_folded(original_node.right, right):
            return updated_node
        if code_of(right) != absorbing:
            return left
        return updated_node if m.findall(left, m.Call()) else right

    def _is_folded(self, old: cst.BaseExpression, new: cst.BaseExpression) -> bool:
        """Return True for a flag that became a constant."""
        return code_of(new) in ("True", "False") and code_of(old) != code_of(new)

    def leave_UnaryOperation(
        self, original_node: cst.UnaryOperation, updated_node: cst.UnaryOperation
    ) -> cst.BaseExpression:
        """Fold the negation of a flag with a constant value."""
        inner = updated_node.expression
        is_not = isinstance(updated_node.operator, cst.Not)
        if is_not and self._is_folded(original_node.expression, inner):
            return cst.Name("False" if code_of(inner) == "True" else "True")
        return updated_node

    def leave_If(self, original_node: cst.If, updated_node: cst.If) -> Any:
        """Keep the taken branch of a constant flag."""
        test = updated_node.test
        if code_of(original_node.test) == code_of(test) or not isinstance(test, cst.Name):
            return updated_node
        is_elif = isinstance(self._resolver.parent(original_node), cst.If)
        # A function without its last `yield` is no generator.
        if is_elif or m.findall(original_node, m.Yield()):
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
        if m.findall(original_node, m.Yield()):
            return updated_node
        return updated_node.with_changes(body=lines[: ends[0] + 1] if ends else lines)


def _is_end(line: cst.BaseStatement) -> bool:
    return isinstance(line, cst.SimpleStatementLine) and isinstance(
        line.body[-1], cst.Return | cst.Raise | cst.Break | cst.Continue
    )


def _is_axes(node: cst.BaseExpression) -> bool:
    """Return True for a tuple of axis names, tuples of them, and None."""
    return isinstance(node, cst.Tuple) and all(
        isinstance(each.value, cst.SimpleString)
        or code_of(each.value) == "None"
        or _is_axes(each.value)
        for each in node.elements
    )


def _with_needs(module: cst.Module, needs: Needs, first: int) -> cst.Module:
    """Insert the required imports and helper functions into a program.

    Args:
        module: The rewritten program.
        needs: What it needs.
        first: The position of new imports.
    """
    sources = needs.sources()
    modules = {*needs.modules}.union(*map(modules_read_by, sources))
    body = list(module.body)
    missing = sorted(modules - set(_imported(body)))
    lines = [cst.parse_statement(f"import {name}\n") for name in missing]
    if lines and first < len(body) and hasattr(body[first], "leading_lines"):
        leading = body[first].leading_lines  # type: ignore[union-attr]
        lines[0] = lines[0].with_changes(leading_lines=leading)
        body[first] = body[first].with_changes(leading_lines=[])
    body[first:first] = lines
    last = _place_of_helpers(body, needs) if sources else 0
    for number, helper in enumerate(sources):
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


def _place_of_imports(body: Sequence[cst.CSTNode]) -> int:
    """Return the position for new imports: the first of those beside the first import of JAX.

    What stands above them, such as `os.environ["XLA_FLAGS"] = ...`, has to run before.
    """
    imports = [place for place, line in enumerate(body) if _is_import(line)]
    of_jax = [place for place in imports if re.search(r"\bjax\b", _code(body[place]))]
    place = next(iter(of_jax or imports), None)
    if place is None or _is_future(body[place]):
        has_docstring = cst.Module(list(body)).get_docstring() is not None  # type: ignore[arg-type]
        return has_docstring + sum(map(_is_future, body))
    while place and _is_import(body[place - 1]) and not _is_future(body[place - 1]):
        place -= 1
    return place


def _place_of_helpers(body: Sequence[cst.CSTNode], needs: Needs) -> int:
    """Return the position after the last import at module level above the first use."""
    used = re.compile("|".join(rf"\b{name}\b" for name in needs.helpers.values()))
    uses = [
        place
        for place, line in enumerate(body)
        if not _is_import(line) and used.search(_code(line))
    ]
    first_use = uses[0] if uses else len(body)
    places = [place for place, line in enumerate(body[:first_use]) if _is_import(line)]
    return places[-1] + 1 if places else first_use


def _code(line: cst.CSTNode) -> str:
    return cst.Module([line]).code  # type: ignore[list-item]
