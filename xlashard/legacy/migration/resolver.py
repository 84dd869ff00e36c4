"""Resolution of full names through imports and variables, and facts of a whole program."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
from libcst.metadata import (
    ImportAssignment,
    MetadataWrapper,
    ParentNodeProvider,
    QualifiedNameProvider,
    QualifiedNameSource,
    ScopeProvider,
)

from xlashard.legacy.migration.rename_rules import GDA, Rename, rule_of


class Resolver:
    """Resolver of the full names of a module's expressions.

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
        """Return the parent of a node."""
        return self._parents.get(node)

    def name(self, node: cst.CSTNode, depth: int = 0) -> str | None:
        """Return the full name of a name or attribute chain; None if it is not imported.

        Args:
            node: The expression.
            depth: The number of variables followed so far.
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
        """Return the value of a variable that is assigned exactly once."""
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
        """Return True if a name is an expression, not an attribute, keyword or target."""
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
    """Visitor that collects assigned values, by the node of the variable."""

    def __init__(self, values: dict[cst.CSTNode, cst.BaseExpression]) -> None:
        super().__init__()
        self._values = values

    def visit_Assign(self, node: cst.Assign) -> None:
        """Collect `name = value`, without unpacking."""
        for target in node.targets:
            if isinstance(target.target, cst.Name):
                self._values[target.target] = node.value


def chain(node: cst.CSTNode) -> tuple[cst.Name | None, list[str]]:
    """Return the root name of an attribute chain, and the attributes.

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


@dataclass
class ProgramFacts:
    """Facts of a whole program.

    Attributes:
        used: The used local names of each import.
        spec_classes: The program's names for `PartitionSpec`.
        specs: Variables whose values are `PartitionSpec`s, or containers of them.
        walks_jaxprs: True if it imports classes of jaxprs.
        reads_mesh_axes: True if `x.mesh_axes` is an attribute of GlobalDeviceArrays.
        enters_meshes: True if one of its functions enters a mesh.
    """

    used: dict[cst.CSTNode, list[str]] = field(default_factory=dict)
    spec_classes: Collection[str] = ()
    specs: Collection[str] = ()
    walks_jaxprs: bool = False
    reads_mesh_axes: bool = False
    enters_meshes: bool = False


def facts_of(wrapper: MetadataWrapper) -> ProgramFacts:
    """Return the facts of a program.

    Args:
        wrapper: The program with its metadata.
    """
    found = ProgramFacts()
    classes: list[str] = []
    names: set[str] = set()
    for scope in set(wrapper.resolve(ScopeProvider).values()):
        for assignment in scope.assignments if scope is not None else ():
            if not isinstance(assignment, ImportAssignment):
                continue
            name = next((n.name for n in assignment.get_qualified_names_for(assignment.name)), "")
            names.add(name)
            if assignment.references:
                found.used.setdefault(assignment.node, []).append(assignment.name)
            if name in ("jax.P", "jax.sharding.PartitionSpec") or rule_of(name) == Rename("jax.P"):
                classes.append(assignment.name)
    collected = _Collect(classes)
    wrapper.module.visit(collected)
    found.spec_classes = classes
    found.specs = collected.specs()
    found.walks_jaxprs = any(name.startswith("jax.core") for name in names)
    found.reads_mesh_axes = (
        any(name in (GDA, GDA.rpartition(".")[0]) for name in names) and not collected.has_axes
    )
    found.enters_meshes = collected.enters_meshes
    return found


class _Collect(cst.CSTVisitor):
    """Walks over a program once."""

    def __init__(self, classes: Collection[str]) -> None:
        super().__init__()
        self.has_axes = False
        self.enters_meshes = False
        self._classes = classes
        self._values: dict[str, list[bool]] = {}
        self._depth = 0

    def specs(self) -> list[str]:
        return [name for name, kinds in self._values.items() if all(kinds)]

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self._depth += 1

    def leave_FunctionDef(self, original_node: cst.FunctionDef) -> None:
        self._depth -= 1

    def visit_With(self, node: cst.With) -> None:
        self.enters_meshes |= self._depth > 0

    def visit_AssignTarget(self, node: cst.AssignTarget) -> None:
        target = node.target
        if isinstance(target, cst.Attribute) and target.attr.value == "mesh_axes":
            self.has_axes = True
        if isinstance(target, cst.Tuple | cst.List):
            for each in target.elements:
                if isinstance(each.value, cst.Name):
                    self._values.setdefault(each.value.value, []).append(False)

    def visit_Assign(self, node: cst.Assign) -> None:
        for each in node.targets:
            if isinstance(each.target, cst.Name):
                is_spec = self._is_spec(node.value)
                self._values.setdefault(each.target.value, []).append(is_spec)

    def visit_AnnAssign(self, node: cst.AnnAssign) -> None:
        if isinstance(node.target, cst.Name):
            self.has_axes |= node.target.value == "mesh_axes"
            self._values.setdefault(node.target.value, []).append(False)

    def visit_For(self, node: cst.For) -> None:
        if isinstance(node.target, cst.Name):
            self._values.setdefault(node.target.value, []).append(False)

    def visit_Param(self, node: cst.Param) -> None:
        self._values.setdefault(node.name.value, []).append(False)

    def _is_spec(self, node: cst.BaseExpression) -> bool:
        """Return whether an expression is a spec, or a literal container of nothing but specs."""
        if isinstance(node, cst.Call):
            return isinstance(node.func, cst.Name) and node.func.value in self._classes
        if isinstance(node, cst.Tuple | cst.List | cst.Dict):
            return all(
                not isinstance(each, cst.StarredElement | cst.StarredDictElement)
                and self._is_spec(each.value)
                for each in node.elements
            )
        return False
