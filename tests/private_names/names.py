"""Read the private names of JAX that `xlashard/_jax` uses from its syntax trees.

This file imports neither xlashard nor pytest, so that it runs where only JAX is installed.
"""

import ast
import importlib
import inspect
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

ROOM = Path(__file__).resolve().parents[2] / "xlashard" / "_jax"
LIST = ROOM / "names.toml"
PRIVATE = "xlashard._jax.private"
# Functions of `private.py` that take a stand-in and a name.
_BY_NAME = ("find_name", "original_value", "replace_name")

HEADER = """\
# Private names of JAX that xlashard/_jax uses. `make names` writes this file from the code.
#
# signature: its parameters in the newest tested JAX; missing for a name without any
# users: the files and functions that read it
# public: a public name of JAX for the same object, or "none"
# optional: true for a name that some tested releases lack
"""


@dataclass(frozen=True, order=True)
class PrivateName:
    """A private name that the package reads.

    Attributes:
        module: Full name of its module.
        name: The name; a module of `private.py` is a name of its parent.
        users: Files with the functions that read it.
        signature: Its parameters, empty without any.
        public: A public name of the same object, or "none".
        optional: True if the code does without it.
    """

    module: str
    name: str
    users: tuple[str, ...] = field(default=(), compare=False)
    signature: str = field(default="", compare=False)
    public: str = field(default="none", compare=False)
    optional: bool = field(default=False, compare=False)

    @property
    def full(self) -> str:
        """Full name: `jax._src.core.Tracer`."""
        return f"{self.module}.{self.name}" if self.module else self.name

    def read(self) -> Any:
        """Return the object in the installed JAX.

        Raises:
            ImportError: If JAX lacks it.
        """
        if self.module:
            parent = _import_module(self.module)
            if hasattr(parent, self.name):
                return getattr(parent, self.name)
        return importlib.import_module(self.full)


def _import_module(name: str) -> Any:
    """Import a module by the name of its file, or by a name that its parent has for it."""
    parent, _, member = name.rpartition(".")
    if parent:
        module = getattr(_import_module(parent), member, None)
        if isinstance(module, ModuleType):
            return module
    return importlib.import_module(name)


def stand_ins(text: str) -> dict[str, str]:
    """Return the module of each stand-in of `private.py`."""
    modules = {}
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Assign(
                targets=[ast.Name(alias)],
                value=ast.Call(func=ast.Name("_stand_in"), args=[ast.Constant(name)]),
            ):
                modules[alias] = name
    return modules


def shown_modules(text: str) -> dict[str, str]:
    """Return the module of each import that `private.py` shows type checkers."""
    modules = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.If):
            for entry in node.body:
                match entry:
                    case ast.ImportFrom(module=str(parent), names=[alias]):
                        modules[alias.asname or alias.name] = f"{parent}.{alias.name}"
                    case ast.Import(names=[alias]):
                        modules[alias.asname or alias.name] = alias.name
    return modules


@dataclass
class _Uses(ast.NodeVisitor):
    """Visitor that collects the names that one file reads of the stand-ins.

    Attributes:
        modules: The module of each stand-in of `private.py`.
        file: Path of the file within the room.
        found: Module, name, user, and True if the name is optional.
        wrong: Uses that don't reach JAX, such as an assignment to a name of a stand-in.
        at_import: Names that are read while the file is imported.
    """

    modules: Mapping[str, str]
    file: str
    aliases: dict[str, str] = field(default_factory=dict)
    found: list[tuple[str, str, str, bool]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    at_import: list[str] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)
    for_checkers: bool = False
    runs_later: int = 0

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.module == PRIVATE:
            for alias in node.names:
                if alias.name in self.modules:
                    self.aliases[alias.asname or alias.name] = self.modules[alias.name]

    def _add(self, module: str, name: str, *, optional: bool = False) -> None:
        if self.for_checkers:
            return
        where = ".".join(self.functions)
        self.found.append((module, name, f"{self.file}: {where}" if where else self.file, optional))
        if not self.runs_later:
            self.at_import.append(f"{self.file}: {module}.{name}")

    def visit_If(self, node: ast.If) -> None:
        before = self.for_checkers
        self.for_checkers = before or (
            isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        )
        for entry in node.body:
            self.visit(entry)
        self.for_checkers = before
        self.visit(node.test)
        for entry in node.orelse:
            self.visit(entry)

    def _visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for outside in (*node.decorator_list, node.args, *filter(None, [node.returns])):
            self.visit(outside)
        self.functions.append(node.name)
        self.runs_later += 1
        for entry in node.body:
            self.visit(entry)
        self.runs_later -= 1
        self.functions.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = _visit_function

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for outside in (*node.decorator_list, *node.bases):
            self.visit(outside)
        self.functions.append(node.name)
        for entry in node.body:
            self.visit(entry)
        self.functions.pop()

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.runs_later += 1
        self.generic_visit(node)
        self.runs_later -= 1

    def visit_TypeAlias(self, node: ast.TypeAlias) -> None:
        """Skip it: no program computes its value."""

    def visit_Attribute(self, node: ast.Attribute) -> None:
        module = self._module(node.value)
        if module is None:
            self.generic_visit(node)
            return
        if not isinstance(node.ctx, ast.Load):
            self.wrong.append(f"{self.file}:{node.lineno}: {node.attr} set on a stand-in")
        self._add(module, node.attr)

    def _module(self, node: ast.expr) -> str | None:
        """Return the module that an expression is the stand-in of."""
        match node:
            case ast.Name(name):
                return self.aliases.get(name)
            case ast.Attribute(value=ast.Name("private"), attr=name):
                return self.modules.get(name)
        return None

    def visit_Call(self, node: ast.Call) -> None:
        match node:
            case ast.Call(func=ast.Name(function), args=[stand_in, name, *_]) if (
                module := self._module(stand_in)
            ) is not None:
                if function in ("getattr", "hasattr", "setattr") and isinstance(name, ast.Constant):
                    self.wrong.append(f"{self.file}:{node.lineno}: {function} of a stand-in")
                if function in _BY_NAME and isinstance(name, ast.Constant):
                    self._add(module, str(name.value), optional=function == "find_name")
        self.generic_visit(node)


def _read_files() -> tuple[dict[str, str], list[_Uses]]:
    modules = stand_ins((ROOM / "private.py").read_text("utf-8"))
    files = []
    for path in sorted(ROOM.rglob("*.py")):
        uses = _Uses(modules, path.relative_to(ROOM).as_posix())
        uses.visit(ast.parse(path.read_text("utf-8")))
        files.append(uses)
    return modules, files


def wrong_uses() -> list[str]:
    """Return the uses of stand-ins that don't reach JAX."""
    return [line for uses in _read_files()[1] for line in uses.wrong]


def reads_at_import() -> list[str]:
    """Return the names that importing a file of the room reads."""
    return [line for uses in _read_files()[1] for line in uses.at_import]


def read_uses() -> list[PrivateName]:
    """Return all names that the package reads, with their users."""
    modules, files = _read_files()
    users: dict[tuple[str, str], dict[str, None]] = {}
    required = set()
    for uses in files:
        for module, name, user, optional in uses.found:
            users.setdefault((module, name), {})[user] = None
            if not optional:
                required.add((module, name))
    for alias, full in modules.items():
        module, _, name = full.rpartition(".")
        users.setdefault((module, name), {}).setdefault(f"private.py: {alias}")
        required.add((module, name))
    return sorted(
        PrivateName(*key, users=tuple(where), optional=key not in required)
        for key, where in users.items()
    )


def describe_parameters(value: object) -> str:
    """Return the parameters of a function or class without annotations; empty if unknown."""
    if not callable(value) or isinstance(value, ModuleType):
        return ""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    empty = inspect.Parameter.empty
    parameters = [
        p.replace(annotation=empty, default=empty if p.default is empty else _DEFAULT)
        for p in signature.parameters.values()
    ]
    return str(inspect.Signature(parameters))


class _Default:
    def __repr__(self) -> str:
        return "..."


_DEFAULT = _Default()

# Later ones are public without promises, as the documentation of jax.extend specifies.
PUBLIC = (
    *("jax", "jax.core", "jax.sharding", "jax.tree_util", "jax.dtypes", "jax.errors"),
    *("jax.stages", "jax.random", "jax.dlpack", "jax.distributed", "jax.lax"),
    *("jax.experimental.layout", "jax.experimental.mesh_utils", "jax.experimental.checkify"),
    *("jax.extend.core", "jax.extend.linear_util", "jax.extend.backend", "jax.extend.sharding"),
    *("jax.interpreters.ad", "jax.interpreters.batching", "jax.interpreters.mlir"),
    *("jax.interpreters.partial_eval", "jax.interpreters.pxla"),
)


def public_names() -> dict[int, str]:
    """Return public names of JAX by the identity of the function, class or setting."""
    names: dict[int, str] = {}
    for module in PUBLIC:
        for name, value in vars(importlib.import_module(module)).items():
            if not name.startswith("_") and callable(value):
                names.setdefault(id(value), f"{module}.{name}")
    return names


def describe(uses: Iterable[PrivateName], known: Mapping[str, PrivateName]) -> list[PrivateName]:
    """Return names with signatures and public substitutes of the installed JAX.

    Args:
        uses: The names.
        known: Entries of the list, whose substitutes by hand are kept.
    """
    public = public_names()
    described = []
    for use in uses:
        by_hand = known[use.full].public if use.full in known else "none"
        try:
            value = use.read()
        except ImportError:
            if not use.optional:
                raise
            value = None  # A name of older releases.
        substitute = public.get(id(value), by_hand) if callable(value) else by_hand
        if substitute == use.full:
            substitute = "none"
        described.append(replace(use, signature=describe_parameters(value), public=substitute))
    return described


def to_toml(names: Iterable[PrivateName]) -> str:
    """Return the text of `names.toml`."""
    blocks = [HEADER]
    for name in names:
        lines = ["[[name]]", f'module = "{name.module}"', f'name = "{name.name}"']
        if name.signature:
            lines.append(f'signature = "{name.signature}"')
        users = "".join(f'\n    "{user}",' for user in name.users)
        lines.append(f"users = [{users}\n]")
        lines.append(f'public = "{name.public}"')
        if name.optional:
            lines.append("optional = true")
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def read_list(path: Path = LIST) -> dict[str, PrivateName]:
    """Return the entries of `names.toml` by full name."""
    if not path.exists():
        return {}
    entries = tomllib.loads(path.read_text("utf-8"))["name"]
    names = [PrivateName(**{**entry, "users": tuple(entry["users"])}) for entry in entries]
    return {name.full: name for name in names}


@dataclass(frozen=True)
class Difference:
    """A private name that the installed JAX lacks, or that takes other parameters there.

    Attributes:
        entry: The name.
        now: Its parameters in the installed JAX; None if it is missing.
    """

    entry: PrivateName
    now: str | None

    @property
    def breaks(self) -> bool:
        """True for a missing name that the code needs."""
        return self.now is None and not self.entry.optional

    def __str__(self) -> str:
        if self.now is None:
            kind = "missing, optional" if self.entry.optional else "missing"
            return f"{kind}: {self.entry.full} (used by {', '.join(self.entry.users)})"
        now = self.now or "without known parameters"
        return f"changed: {self.entry.full}{self.entry.signature} is now {now}"


def find_differences(names: Iterable[PrivateName]) -> Iterator[Difference]:
    """Yield how the installed JAX differs from the list."""
    for entry in names:
        try:
            value = entry.read()
        except ImportError:
            yield Difference(entry, None)
            continue
        now = describe_parameters(value)
        if now != entry.signature:
            yield Difference(entry, now)
