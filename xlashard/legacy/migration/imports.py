"""Rewriting of imports."""

from collections.abc import Sequence

import libcst as cst
from libcst.helpers import get_full_name_for_node

from xlashard.legacy.migration.rename_rules import Mark, Module, Rename, canonical, rule_of
from xlashard.legacy.modules import entries

_ERA_PACKAGES = ("jax.experimental.gda_serialization",)


def is_lost_module(name: str) -> bool:
    """Return True if a removed module has no single replacement.

    Args:
        name: The full name.
    """
    entry = entries().get(name) or entries().get(canonical(name))
    return entry is not None and ":" not in entry.source and not entry.stays


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
        if len(kept) == len(node.names):
            return None
        if kept:
            kept[-1] = kept[-1].with_changes(comma=node.names[-1].comma)
            return [node.with_changes(names=kept), *_merged(added)]
        return _merged(added)

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
        if len(kept) == len(node.names):
            return None
        if kept:
            kept[-1] = kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
            return [node.with_changes(names=kept), *added]
        return added

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
