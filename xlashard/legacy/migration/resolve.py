"""Full names of what stands in a program: by its imports, and by variables that stand for them."""

from collections.abc import Mapping
from typing import Any

import libcst as cst
from libcst.metadata import (
    MetadataWrapper,
    ParentNodeProvider,
    QualifiedNameProvider,
    QualifiedNameSource,
    ScopeProvider,
)


class Resolver:
    """The full names of the expressions of one module.

    Args:
        wrapper: The module with its metadata.
    """

    def __init__(self, wrapper: MetadataWrapper) -> None:
        self._names: Mapping[cst.CSTNode, Any] = wrapper.resolve(QualifiedNameProvider)
        self._scopes: Mapping[cst.CSTNode, Any] = wrapper.resolve(ScopeProvider)
        self._parents: Mapping[cst.CSTNode, cst.CSTNode] = wrapper.resolve(ParentNodeProvider)
        self._values: dict[cst.CSTNode, cst.BaseExpression] = {}
        wrapper.module.visit(_Assignments(self._values))

    def parent(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """The node around a node."""
        return self._parents.get(node)

    def name(self, node: cst.CSTNode, depth: int = 0) -> str | None:
        """The full name that an expression reads, if it is a name or a chain of attributes.

        Args:
            node: The expression.
            depth: How many variables were followed to come here.
        """
        if not isinstance(node, cst.Name | cst.Attribute) or not self.is_read(node):
            return None
        found = [
            each.name
            for each in self._resolved(node)
            if each.source is QualifiedNameSource.IMPORT and not each.name.startswith(".")
        ]
        if found:
            return min(found, key=lambda name: (not name.startswith("jax."), name))
        root, attributes = chain(node)
        value = self.value(root) if root is not None else None
        if value is None or depth > 4:
            return None
        before = self.name(value, depth + 1)
        return ".".join([before, *attributes]) if before else None

    def value(self, node: cst.CSTNode | None) -> cst.BaseExpression | None:
        """The expression that a variable has, where it is assigned exactly once."""
        if not isinstance(node, cst.Name):
            return None
        scope = self._scopes.get(node)
        if scope is None:
            return None
        assignments = list(scope[node.value])
        if len(assignments) != 1:
            return None
        assigned = getattr(assignments[0], "node", None)
        return None if assigned is None else self._values.get(assigned)

    def is_read(self, node: cst.CSTNode) -> bool:
        """Whether a name is an expression, and not an attribute, a keyword or a target."""
        parent = self._parents.get(node)
        if isinstance(parent, cst.Attribute):
            return parent.value is node
        if isinstance(parent, cst.Arg):
            return parent.keyword is not node
        if isinstance(parent, cst.Param):
            return parent.default is node
        return not isinstance(
            parent, cst.ImportAlias | cst.AsName | cst.FunctionDef | cst.ClassDef | cst.NameItem
        ) or (isinstance(parent, cst.ClassDef) and parent.name is not node)

    def _resolved(self, node: cst.CSTNode) -> Any:
        found = self._names.get(node, ())
        return found() if callable(found) else found


class _Assignments(cst.CSTVisitor):
    """Collects the values of variables, by the node of their name."""

    def __init__(self, values: dict[cst.CSTNode, cst.BaseExpression]) -> None:
        super().__init__()
        self._values = values

    def visit_Assign(self, node: cst.Assign) -> None:
        """Note `name = value`, and nothing that takes a value apart."""
        for target in node.targets:
            if isinstance(target.target, cst.Name):
                self._values[target.target] = node.value


def chain(node: cst.CSTNode) -> tuple[cst.Name | None, list[str]]:
    """Return the name that a chain of attributes starts with, and the attributes.

    Args:
        node: The expression.

    Example:
        >>> root, attributes = chain(cst.parse_expression("a.b.c"))
        >>> root.value, attributes
        ('a', ['b', 'c'])
    """
    attributes: list[str] = []
    while isinstance(node, cst.Attribute):
        attributes.append(node.attr.value)
        node = node.value
    return (node if isinstance(node, cst.Name) else None), attributes[::-1]
