"""Read a package's syntax trees and find imports that its layers forbid.

The tree is read, never imported, so that imports behind a condition or inside a function are found
as well. `test_layers.py` defines the layers.
"""

import ast
import functools
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

INTERNALS = ("jax._src", "jax.extend", "jax.interpreters", "jaxlib", "libtpu")
DYNAMIC_IMPORTS = ("import_module", "__import__", "find_spec", "deferred")


@dataclass(frozen=True)
class Layers:
    """Layers of a package: which modules may import which.

    Attributes:
        package: Name of the package.
        rooms: Its direct members to their numbers; a room imports from lower numbers only. A module
            with an entry of its own ("room.module") counts as a room.
        common: Members that everything may import and that themselves import only each other.
        door: The one module that may import `INTERNALS`.
        pure: Rooms and modules that import nothing but the standard library and `pure_allowed`,
            however far one follows their imports. Imports for types alone, by `deferred`, and in
            functions count for direction and cycles only.
        pure_allowed: Distributions that a pure room or module may use.
        private: Rooms and modules that no other module imports with itself; pure ones in them don't
            count. The public ring is all the rest.
        deferred: Modules that may import one inside a function, for a quick start. Direction and
            cycles count for these imports as for all others.
        hooks: The module that names what lower rooms call of higher ones. Its imports wait for the
            call, and count neither as an edge nor for a cycle.
        importers: Rooms that few modules may import, with these modules.
    """

    package: str
    rooms: Mapping[str, int]
    common: frozenset[str]
    door: str
    pure: frozenset[str] = frozenset()
    pure_allowed: frozenset[str] = frozenset({"numpy"})
    private: frozenset[str] = frozenset()
    deferred: frozenset[tuple[str, str]] = frozenset()
    hooks: str = ""
    importers: Mapping[str, frozenset[str]] = field(default_factory=dict)


@dataclass(frozen=True, order=True)
class Violation:
    """Forbidden import."""

    path: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}"


@dataclass(frozen=True)
class Import:
    """Imported module, by its full name."""

    target: str
    line: int
    in_function: bool
    for_types: bool = False
    is_deferred: bool = False

    @property
    def waits(self) -> bool:
        """Return True if importing the module does not run this import."""
        return self.in_function or self.for_types or self.is_deferred


@dataclass(frozen=True)
class Module:
    """File of the package."""

    name: str
    path: Path
    is_package: bool
    imports: tuple[Import, ...]
    classes: tuple[str, ...] = ()


@dataclass
class _Reader(ast.NodeVisitor):
    """Visitor that collects the imports of one file, and uses of internals through attributes."""

    module: str
    is_package: bool
    known: frozenset[str]
    depth: int = 0
    for_types: bool = False
    found: list[Import] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.classes.append(node.name)
        self.generic_visit(node)

    def _add(self, target: str, node: ast.AST, *, is_deferred: bool = False) -> None:
        line = getattr(node, "lineno", 0)
        self.found.append(Import(target, line, self.depth > 0, self.for_types, is_deferred))

    def visit_If(self, node: ast.If) -> None:
        if _dotted(node.test).rpartition(".")[2].lstrip("_") != "TYPE_CHECKING":
            return self.generic_visit(node)
        before, self.for_types = self.for_types, True
        for each in node.body:
            self.visit(each)
        self.for_types = before
        for each in node.orelse:
            self.visit(each)

    def _visit_function(self, node: ast.AST) -> None:
        self.depth += 1
        self.generic_visit(node)
        self.depth -= 1

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _visit_function

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name, node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = self._absolute(node)
        for alias in node.names:
            full = f"{base}.{alias.name}"
            # `from a import b` means the module a.b where there is one, and else a name in a.
            is_module = full in self.known or _is_internal(full)
            self._add(full if is_module else base, node)

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.module.split(".")
        drop = node.level - 1 if self.is_package else node.level
        parent = parts[: len(parts) - drop]
        return ".".join([*parent, node.module] if node.module else parent)

    def visit_Call(self, node: ast.Call) -> None:
        name = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
        if name in DYNAMIC_IMPORTS and node.args and isinstance(node.args[0], ast.Constant):
            value = node.args[0].value
            if isinstance(value, str):
                relative = value.startswith(".")
                full = self.module.partition(".")[0] + value if relative else value
                self._add(full, node, is_deferred=name == "deferred")
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        dotted = _dotted(node)
        if dotted in INTERNALS:
            self._add(dotted, node)
        self.generic_visit(node)


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return ""


def _is_internal(name: str) -> bool:
    return any(name == internal or name.startswith(f"{internal}.") for internal in INTERNALS)


@functools.cache
def read_package(root: Path, package: str) -> dict[str, Module]:
    """Read all files of the package.

    Args:
        root: Folder that holds the package's folder.
        package: Name of the package.

    Returns:
        Module name to module.
    """
    paths: dict[str, Path] = {}
    for path in sorted((root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    modules = {}
    for name, path in paths.items():
        is_package = path.name == "__init__.py"
        reader = _Reader(name, is_package, frozenset(paths))
        reader.visit(ast.parse(path.read_text(encoding="utf-8"), str(path)))
        modules[name] = Module(name, path, is_package, tuple(reader.found), tuple(reader.classes))
    return modules


def find_violations(root: Path, layers: Layers) -> list[Violation]:
    """Find everything in the package that its layers forbid, sorted by place."""
    modules = dict(read_package(root, layers.package))
    if layers.hooks:
        modules[layers.hooks] = replace(modules[layers.hooks], imports=())
    found = [
        *_wrong_directions(modules, layers),
        *_hidden_imports(modules, layers),
        *_second_doors(modules, layers),
        *_impure(modules, layers),
        *_private_imports(modules, layers),
        *_cycles(modules, layers),
        *_surplus_importers(modules, layers),
    ]
    return sorted(
        Violation(str(Path(entry.path).relative_to(root)), entry.line, entry.what)
        for entry in set(found)
    )


def _room(name: str, layers: Layers) -> str | None:
    """Return the room that the module is or lies in; '' for the package, None outside of it."""
    head, _, rest = name.partition(".")
    if head != layers.package:
        return None
    room = rest
    while room and room not in layers.rooms and room not in layers.common:
        room = room.rpartition(".")[0]
    return room or rest


def _violation(module: Module, line: int, what: str) -> Violation:
    return Violation(str(module.path), line, what)


def _wrong_directions(modules: Mapping[str, Module], layers: Layers) -> Iterator[Violation]:
    for module in modules.values():
        room = _room(module.name, layers) or ""
        if room not in layers.rooms and room not in layers.common:
            yield _violation(module, 1, f"{module.name} is in no room of the layer table")
            continue
        for entry in module.imports:
            target = _room(entry.target, layers)
            if target is None or (target == room and room):
                continue
            what = _why_forbidden(room, target, layers)
            if what:
                yield _violation(module, entry.line, f"{what} ({entry.target})")


def _why_forbidden(room: str, target: str, layers: Layers) -> str:
    """Return why `room` may not import `target`; '' if it may."""
    if target in layers.common:
        return ""
    if target not in layers.rooms:
        return f"{room or layers.package} imports {target}, which is in no room"
    if room in layers.common:
        return f"{room} may be imported by all and so may import no room, but imports {target}"
    mine, its = layers.rooms[room], layers.rooms[target]
    if its < mine:
        return ""
    return f"{room or layers.package} ({mine}) imports {target or layers.package} ({its})"


def _hidden_imports(modules: Mapping[str, Module], layers: Layers) -> Iterator[Violation]:
    for module in modules.values():
        for entry in module.imports:
            allowed = (module.name, entry.target) in layers.deferred
            if entry.in_function and not allowed and _room(entry.target, layers) is not None:
                yield _violation(module, entry.line, f"import of {entry.target} inside a function")


def _second_doors(modules: Mapping[str, Module], layers: Layers) -> Iterator[Violation]:
    for module in modules.values():
        if module.name == f"{layers.package}.{layers.door}":
            continue
        for entry in module.imports:
            if _is_internal(entry.target):
                yield _violation(module, entry.line, f"{entry.target} used outside {layers.door}")


def _surplus_importers(modules: Mapping[str, Module], layers: Layers) -> Iterator[Violation]:
    for module in modules.values():
        for entry in module.imports:
            for room, importers in layers.importers.items():
                home = f"{layers.package}.{room}"
                inside = _lies_in(entry.target, home) and not _lies_in(module.name, home)
                if inside and module.name not in importers:
                    yield _violation(module, entry.line, f"{room} is imported by {module.name}")


def _lies_in(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def _impure(modules: Mapping[str, Module], layers: Layers) -> Iterator[Violation]:
    """Yield a violation for each import of another distribution, with a chain that leads there."""
    chains = {name: (name,) for name in modules if _is_pure(name, layers)}
    pending = list(chains)
    for importer in pending:  # in the order of the length of their chains
        # With a module Python imports the packages that it lies in.
        for parent in _with_parents(importer):
            if parent in modules and parent not in chains:
                chains[parent] = (*chains[importer], parent)
                pending.append(parent)
        for entry in modules[importer].imports:
            if entry.waits:
                continue
            if _room(entry.target, layers) is None:
                head = entry.target.partition(".")[0]
                if head not in layers.pure_allowed and head not in sys.stdlib_module_names:
                    allowed = ", ".join(sorted(layers.pure_allowed))
                    chain = " → ".join((*chains[importer], head))
                    what = f"{head} used in what a pure room imports: {chain} (only {allowed})"
                    yield _violation(modules[importer], entry.line, what)
            elif entry.target in modules and entry.target not in chains:
                chains[entry.target] = (*chains[importer], entry.target)
                pending.append(entry.target)


def _is_pure(name: str, layers: Layers) -> bool:
    return any(_lies_in(name, f"{layers.package}.{pure}") for pure in layers.pure)


def _private_imports(modules: Mapping[str, Module], layers: Layers) -> Iterator[Violation]:
    """Yield the imports by which the public ring would load a module of the private one."""
    for module in modules.values():
        if is_private(module.name, layers):
            continue
        for entry in module.imports:
            is_pure = _is_pure(entry.target, layers)
            if not entry.waits and not is_pure and is_private(entry.target, layers):
                what = f"{module.name} of the public ring imports {entry.target} of the private one"
                yield _violation(module, entry.line, what)


def is_private(name: str, layers: Layers) -> bool:
    """Return True for a module of the private ring, or a pure one in its rooms."""
    return any(_lies_in(name, f"{layers.package}.{private}") for private in layers.private)


def _with_parents(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[: n + 1]) for n in range(1, len(parts)))


def _cycles(modules: Mapping[str, Module], layers: Layers) -> Iterator[Violation]:
    """Yield a violation for each import that closes a cycle, wherever it is written."""
    graph = {
        name: {entry.target: entry.line for entry in module.imports if entry.target in modules}
        for name, module in modules.items()
    }
    state: dict[str, str] = {}
    trail: list[str] = []

    def walk(name: str) -> Iterator[Violation]:
        state[name] = "open"
        trail.append(name)
        for target, line in graph[name].items():
            if state.get(target) == "open":
                cycle = [*trail[trail.index(target) :], target]
                yield _violation(modules[name], line, f"import cycle {' → '.join(cycle)}")
            elif target not in state:
                yield from walk(target)
        trail.pop()
        state[name] = "done"

    for name in modules:
        if name not in state:
            yield from walk(name)
