"""Full names of a program, the rule for each removed one, and facts of the whole program."""

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
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

from xlashard.legacy.modules import Entry, entries, entries_by_module


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
        for assign in select_nodes(wrapper, cst.Assign):
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
        root, attributes = chain(node)
        if root is None:
            # An attribute of a call's result, for which libcst returns a name as well.
            return None
        names = [
            each.name
            for each in self._resolved(node)
            if each.source is QualifiedNameSource.IMPORT and not each.name.startswith(".")
        ]
        if names:
            return min(names, key=lambda name: (not name.startswith("jax."), name))
        value = self.value(root)
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

    def is_target(self, node: cst.CSTNode) -> bool:
        """Return True if an expression is assigned or deleted.

        Args:
            node: The expression.
        """
        parent = self._parents.get(node)
        while isinstance(parent, cst.Tuple | cst.List | cst.Element | cst.StarredElement):
            node, parent = parent, self._parents.get(parent)
        if isinstance(parent, cst.AnnAssign | cst.AugAssign | cst.For | cst.CompFor):
            return parent.target is node
        return isinstance(parent, cst.AssignTarget | cst.Del | cst.AsName)

    def _resolved(self, node: cst.CSTNode) -> Any:
        names = self._names.get(node, ())
        return names() if callable(names) else names


def select_nodes[T: cst.CSTNode](wrapper: MetadataWrapper, *kinds: type[T]) -> Iterator[T]:
    """Yield a module's nodes of some kinds.

    Their parents are known already: `findall` of libcst visits the whole module again.

    Args:
        wrapper: The module with its metadata.
        kinds: The kinds.
    """
    return (node for node in wrapper.resolve(ParentNodeProvider) if isinstance(node, kinds))


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


# Programs that assign the attribute, or declare a field of its name, have a class of their own.
_SETS_MESH_AXES = m.OneOf(
    m.AssignTarget(m.Attribute(attr=m.Name("mesh_axes"))),
    m.AnnAssign(target=m.Name("mesh_axes")),
)


@dataclass(frozen=True)
class ProgramFacts:
    """Facts of a whole program.

    Attributes:
        used: The used local names of each import.
        spec_classes: The program's names for `PartitionSpec`.
        uses_specs: True if it reads `PartitionSpec`, also as an attribute of a module.
        specs: Variables whose values are `PartitionSpec`s, or containers of them.
        walks_jaxprs: True if it imports classes of jaxprs.
        reads_mesh_axes: True if `x.mesh_axes` may be an attribute of GlobalDeviceArrays.
        imports_jax: True if it imports JAX or a part of it.
        classes: The names of its classes.
        names: All names in it.
        functions: The code of its functions.
        parameters: The names of parameters of its functions.
    """

    used: Mapping[cst.CSTNode, Sequence[str]]
    spec_classes: Collection[str]
    uses_specs: bool
    specs: Collection[str]
    walks_jaxprs: bool
    reads_mesh_axes: bool
    imports_jax: bool
    classes: Collection[str]
    names: Collection[str]
    functions: Collection[str]
    parameters: Collection[str]


def facts_of(wrapper: MetadataWrapper) -> ProgramFacts:
    """Return the facts of a program.

    Args:
        wrapper: The program with its metadata.
    """
    used: dict[cst.CSTNode, list[str]] = {}
    classes: list[str] = []
    names: set[str] = set()
    for scope in set(wrapper.resolve(ScopeProvider).values()):
        for assignment in scope.assignments if scope is not None else ():
            if not isinstance(assignment, ImportAssignment):
                continue
            name = next((n.name for n in assignment.get_qualified_names_for(assignment.name)), "")
            names.add(name)
            if assignment.references:
                used.setdefault(assignment.node, []).append(assignment.name)
            if name in ("jax.P", "jax.sharding.PartitionSpec") or rule_of(name) == Rename("jax.P"):
                classes.append(assignment.name)
    assigned = select_nodes(wrapper, cst.AssignTarget, cst.AnnAssign)
    sets_axes = any(m.matches(each, _SETS_MESH_AXES) for each in assigned)
    imports_gdas = not names.isdisjoint((GDA, GDA.rpartition(".")[0]))
    all_names = {node.value for node in select_nodes(wrapper, cst.Name)}
    functions = select_nodes(wrapper, cst.FunctionDef)
    return ProgramFacts(
        used=used,
        spec_classes=classes,
        uses_specs=bool(classes) or "PartitionSpec" in all_names,
        specs=_spec_variables(wrapper, classes),
        walks_jaxprs=any(name.startswith("jax.core") for name in names),
        reads_mesh_axes=imports_gdas or not sets_axes,
        imports_jax=any(name.partition(".")[0] == "jax" for name in names),
        classes={node.name.value for node in select_nodes(wrapper, cst.ClassDef)},
        names=all_names,
        functions={wrapper.module.code_for_node(node).strip() for node in functions},
        parameters={node.name.value for node in select_nodes(wrapper, cst.Param)},
    )


def _spec_variables(wrapper: MetadataWrapper, classes: Collection[str]) -> list[str]:
    """Return the variables to which a program assigns nothing but specs."""
    are_specs: defaultdict[str, list[bool]] = defaultdict(list)
    for name, value in _assignments(wrapper):
        are_specs[name].append(value is not None and _is_spec(value, classes))
    return [name for name, kinds in are_specs.items() if all(kinds)]


def _assignments(wrapper: MetadataWrapper) -> Iterator[tuple[str, cst.BaseExpression | None]]:
    """Yield each variable and its value; None for elements, arguments and loop variables."""
    for node in select_nodes(wrapper, cst.Assign, cst.AnnAssign, cst.For, cst.Param):
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


@dataclass(frozen=True)
class Rename:
    """Rule that replaces a name by today's name.

    Attributes:
        to: Today's full name.
        inline: True to replace uses and drop the import; False to rewrite the import only.
    """

    to: str
    inline: bool = False


@dataclass(frozen=True)
class Expression:
    """Rule that replaces a name by an expression and drops its import.

    Attributes:
        code: The expression.
    """

    code: str


@dataclass(frozen=True)
class Module:
    """Rule that replaces a module and keeps its local name.

    Attributes:
        to: The full name of today's module.
    """

    to: str


@dataclass(frozen=True)
class Helper:
    """Rule that replaces a function by a helper inserted into the program.

    Attributes:
        name: The name of the helper.
        suffix: Code after the name, such as `()`.
    """

    name: str
    suffix: str = ""


@dataclass(frozen=True)
class Mark:
    """Rule that adds a comment, for names that need a manual change.

    Attributes:
        text: The comment.
    """

    text: str


type Rule = Rename | Expression | Module | Helper | Mark

PJIT = "jax.experimental.pjit.pjit"
CONSTRAINT = "jax.experimental.pjit.with_sharding_constraint"
GDA_MODULE = "jax.experimental.global_device_array"
GDA = f"{GDA_MODULE}.GlobalDeviceArray"
ENV = "jax.experimental.maps.thread_resources.env"
HOST_CALLBACK = "jax.experimental.host_callback"
GDA_SERIALIZATION = "jax.experimental.gda_serialization.serialization"
SERIALIZATION = "jax.experimental.array_serialization.serialization"

_ALIASES = {
    "jax.pxla": "jax.interpreters.pxla",
    "jax.xla": "jax.interpreters.xla",
    "jax.interpreters.pxla.thread_resources": "jax.experimental.maps.thread_resources",
    "jax.interpreters.pxla.ResourceEnv": "jax.experimental.maps.ResourceEnv",
}
_MESH_IN_FORCE = Helper("_mesh_in_force", "()")
_OWN: dict[str, Rule] = {
    PJIT: Helper("_pjit"),
    CONSTRAINT: Rename("jax.lax.with_sharding_constraint"),
    "jax.experimental.pjit.FROM_GDA": Expression("None"),
    "jax.experimental.pjit.REPLICATED": Expression("jax.P()"),
    GDA: Rename("jax.Array", inline=True),
    "jax.experimental.global_device_array.Shard": Rename("jax.Shard"),
    "jax.experimental.maps.mesh": Rename("jax.sharding.Mesh", inline=True),
    ENV: _MESH_IN_FORCE,
    f"{ENV}.physical_mesh": _MESH_IN_FORCE,
    "jax.config.jax_array": Expression("True"),
    "jax.config.jax_parallel_functions_output_gda": Expression("False"),
    "jax.core.ClosedJaxpr": Rename("jax.extend.core.ClosedJaxpr"),
    f"{HOST_CALLBACK}.barrier_wait": Rename("jax.effects_barrier", inline=True),
    "jax.interpreters.sharded_jit.PartitionSpec": Rename("jax.P"),
    f"{GDA}.from_batched_callback": Helper("_array_from_batched_callback"),
    f"{GDA}.from_batched_callback_with_devices": Helper(
        "_array_from_batched_callback_with_devices"
    ),
    "jax.device_put_replicated": Helper("_device_put_replicated"),
    "jax.device_put_sharded": Helper("_device_put_sharded"),
    f"{HOST_CALLBACK}.id_tap": Helper("_id_tap"),
    f"{HOST_CALLBACK}.call": Helper("_call_host"),
    f"{GDA_SERIALIZATION}._get_metadata": Helper("_get_metadata"),
    f"{SERIALIZATION}._get_metadata": Helper("_get_metadata"),
    f"{GDA_SERIALIZATION}.run_deserialization": Helper("_run_deserialization"),
    f"{GDA_SERIALIZATION}._spec_has_metadata": Helper("_spec_has_metadata"),
}
_CLASSES = {"MeshPspecSharding": "jax.sharding.NamedSharding"}
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.\w+)+")
_CALLED = re.compile(r"(jax[\w.]+)\(\)")
_IMPORT = re.compile(r"import ([\w.]+)|from ([\w.]+) import (\w+)")
_TYPES = ("jax.Array", "jax.P", "jax.sharding.Sharding", "jax.sharding.NamedSharding")


def canonical(name: str) -> str:
    """Return the canonical form of a name, such as `jax.interpreters.pxla` for `jax.pxla`.

    Args:
        name: A full name.
    """
    for alias, known in _ALIASES.items():
        if name == alias or name.startswith(f"{alias}."):
            name = known + name[len(alias) :]
    return name.replace("jax.config.config.", "jax.config.")


@lru_cache(maxsize=4096)
def rule_of(name: str) -> Rule | None:
    """Return the rule for a full name; None to keep the name.

    Args:
        name: The name, such as `jax.experimental.maps.Mesh`.
    """
    known = canonical(name)
    if known in _OWN:
        return _OWN[known]
    last = name.rpartition(".")[2]
    if last in _CLASSES and known in entries():
        return Rename(_CLASSES[last], inline=last != _CLASSES[last].rpartition(".")[2])
    entry = entries().get(known) or entries().get(name)
    if entry is None or entry.stays or name.startswith("jax.Array."):
        return None
    return _rule_of_entry(entry, last)


def _rule_of_entry(entry: Entry, last: str) -> Rule:
    today = entry.today
    if entry.treatment == "refused":
        return _mark(entry)
    if match := _IMPORT.fullmatch(today):
        return Module(match[1] or f"{match[2]}.{match[3]}")
    if entry.is_module:
        return Module(today) if today == "jax.core" else _mark(entry)
    if today.startswith("xlashard"):
        return _mark(entry)
    if today.startswith("tuple["):
        return Expression(today)
    if match := _CALLED.fullmatch(today):
        today = match[1]
    same = today.rpartition(".")[2] in (last, last.removeprefix("tree_"))
    if not _DOTTED.fullmatch(today) or not (same or today in _TYPES or _is_drop_in(entry)):
        return _mark(entry)
    return Rename(today, inline=today != "jax.P" and today.rpartition(".")[2] != last)


def _is_drop_in(entry: Entry) -> bool:
    return entry in entries_by_module()["numpy"] or entry.today in ("jax.tree.map", "jax.typeof")


def _mark(entry: Entry) -> Mark:
    why = f" ({entry.note.rstrip('.')})" if entry.treatment == "refused" else ""
    return Mark(f"{entry.name} was removed in JAX {entry.gone}{why}. Write: {entry.today}")
