"""A program of the era, rewritten for today's JAX."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import libcst as cst
from libcst.metadata import MetadataWrapper

from xlashard.legacy.migration.calls import Needs
from xlashard.legacy.migration.facts import facts_of
from xlashard.legacy.migration.helpers import MODULES, source_of, with_callees
from xlashard.legacy.migration.resolve import Resolver
from xlashard.legacy.migration.rewriter import FromGda, Rewriter


@dataclass(frozen=True)
class Migrated:
    """A program with today's names.

    Attributes:
        code: Its text.
        marked: How many places have a comment, for a person has to rewrite them.
    """

    code: str
    marked: int


def migrate(code: str) -> Migrated:
    r"""Return a program with today's names.

    Args:
        code: Its text.

    Raises:
        libcst.ParserSyntaxError: It is not Python.

    Example:
        >>> print(migrate("from jax import tree_map\nx = tree_map(abs, [-1])\n").code, end="")
        import jax
        x = jax.tree.map(abs, [-1])
    """
    wrapper = MetadataWrapper(cst.parse_module(code))
    rewriter = Rewriter(Resolver(wrapper), facts_of(wrapper))
    module = wrapper.visit(rewriter).visit(FromGda())
    return Migrated(_with_needs(module, rewriter.needs).code, rewriter.marked)


def _with_needs(module: cst.Module, needs: Needs) -> cst.Module:
    """The program with the imports and functions that it needs besides."""
    modules = {*needs.modules, *["jax"] * bool(needs.helpers)}
    modules |= {MODULES[name] for name in needs.helpers if name in MODULES}
    helpers = [source_of(name) for name in with_callees(needs.helpers)]
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
    """Where an import may stand: before the first one, behind the docstring and `__future__`."""
    for place, line in enumerate(body):
        if _is_import(line) and not _is_future(line):
            return place
    has_docstring = cst.Module(list(body)).get_docstring() is not None  # type: ignore[arg-type]
    return has_docstring + sum(map(_is_future, body))


def _last_import(body: Sequence[cst.CSTNode]) -> int:
    """Behind the last import of the module's own level."""
    places = [place for place, line in enumerate(body) if _is_import(line)]
    return places[-1] + 1 if places else _first_import(body)
