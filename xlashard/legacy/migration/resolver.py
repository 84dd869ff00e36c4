"""Resolution of full names through imports and variables, and facts of a whole program."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
from libcst import matchers as m
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
        # The values of `name = value`, without unpacking, by the node of the variable.
        self._values: dict[cst.CSTNode, cst.BaseExpression] = {}
        for node in m.findall(wrapper.module, m.Assign()):
            assign = cst.ensure_type(node, cst.Assign)
            for target in assign.targets:
                if isinstance(target.target, cst.Name):
                    self._values[target.target] = assign.value

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
        names = [
            each.name
            for each in self._resolved(node)
            if each.source is QualifiedNameSource.IMPORT and not each.name.startswith(".")
        ]
        if names:
            return min(names, key=lambda name: (not name.startswith("jax."), name))
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
        names = self._names.get(node, ())
        return names() if callable(names) else names


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
    facts = ProgramFacts()
    classes: list[str] = []
    names: set[str] = set()
    for scope in set(wrapper.resolve(ScopeProvider).values()):
        for assignment in scope.assignments if scope is not None else ():
            if not isinstance(assignment, ImportAssignment):
                continue
            name = next((n.name for n in assignment.get_qualified_names_for(assignment.name)), "")
            names.add(name)
            if assignment.references:
                facts.used.setdefault(assignment.node, []).append(assignment.name)
            if name in ("jax.P", "jax.sharding.PartitionSpec") or rule_of(name) == Rename("jax.P"):
                classes.append(assignment.name)
    module = wrapper.module
    sets_axes = m.OneOf(
        m.AssignTarget(m.Attribute(attr=m.Name("mesh_axes"))),
        m.AnnAssign(target=m.Name("mesh_axes")),
    )
    facts.spec_classes = classes
    facts.specs = _spec_variables(module, classes)
    facts.walks_jaxprs = any(name.startswith("jax.core") for name in names)
    facts.reads_mesh_axes = not names.isdisjoint((GDA, GDA.rpartition(".")[0])) and not m.findall(
        module, sets_axes
    )
    functions = m.findall(module, m.FunctionDef())
    facts.enters_meshes = any(m.findall(function, m.With()) for function in functions)
    return facts


def _spec_variables(module: cst.Module, classes: Collection[str]) -> list[str]:
    """Return the variables to which a program assigns nothing but specs."""
    are_specs: defaultdict[str, list[bool]] = defaultdict(list)
    for name, value in _assignments(module):
        are_specs[name].append(value is not None and _is_spec(value, classes))
    return [name for name, kinds in are_specs.items() if all(kinds)]


def _assignments(module: cst.Module) -> Iterator[tuple[str, cst.BaseExpression | None]]:
    """Yield each variable and its value; None for elements, arguments and loop variables."""
    for node in m.findall(module, m.OneOf(m.Assign(), m.AnnAssign(), m.For(), m.Param())):
        match node:
            case cst.Assign(targets=targets, value=value):
                for each in targets:
                    match each.target:
                        case cst.Name(value=name):
                            yield name, value
                        case cst.Tuple(elements=elements) | cst.List(elements=elements):
                            for element in elements:
                                if isinstance(element.value, cst.Name):
                                    yield element.value.value, None
            case (
                cst.AnnAssign(target=cst.Name(value=name))
                | cst.For(target=cst.Name(value=name))
                | cst.Param(name=cst.Name(value=name))
            ):
                yield name, None


def _is_spec(node: cst.BaseExpression, classes: Collection[str]) -> bool:
    """Return whether an expression is a spec, or a literal container of nothing but specs."""
    if isinstance(node, cst.Call):
        return isinstance(node.func, cst.Name) and node.func.value in classes
    if isinstance(node, cst.Tuple | cst.List | cst.Dict):
        return all(
            not isinstance(each, cst.StarredElement | cst.StarredDictElement)
            and _is_spec(each.value, classes)
            for each in node.elements
        )
    return False
