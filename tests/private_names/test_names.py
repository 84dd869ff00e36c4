"""The list of private names is what the code reads and what the installed JAX has."""

import ast
import warnings

import pytest

from tests.private_names import names
from tests.private_names.names import (
    ROOM,
    PrivateName,
    _Uses,
    describe_parameters,
    find_differences,
    read_list,
    read_uses,
    reads_at_import,
    shown_modules,
    stand_ins,
    to_toml,
    wrong_uses,
)

pytestmark = pytest.mark.jax_version


def test_list_has_the_names_that_the_code_reads() -> None:
    listed = {name.full: (name.users, name.optional) for name in read_list().values()}
    read = {name.full: (name.users, name.optional) for name in read_uses()}
    assert listed == read, "make names"


def test_installed_jax_has_every_name() -> None:
    differences = list(find_differences(read_list().values()))
    assert not [str(difference) for difference in differences if difference.breaks]
    for difference in differences:
        warnings.warn(str(difference), stacklevel=1)


def test_type_checkers_see_the_modules_behind_the_stand_ins() -> None:
    text = (ROOM / "private.py").read_text("utf-8")
    assert stand_ins(text) == shown_modules(text)


def test_every_use_of_a_stand_in_reaches_jax() -> None:
    assert not wrong_uses()


def test_importing_the_room_reads_no_private_name() -> None:
    assert not reads_at_import()
    assert uses_in("x = core.a\ndef f(x=core.b): return core.c").at_import == [
        "a.py: jax._src.core.a",
        "a.py: jax._src.core.b",
    ]


def uses_in(code: str) -> _Uses:
    uses = _Uses({"core": "jax._src.core", "mlir": "jax.mlir"}, "a.py")
    uses.visit(ast.parse(f"from xlashard._jax.private import core, mlir as m\n{code}"))
    return uses


def test_reader_finds_chains_lambdas_and_names_in_texts() -> None:
    code = """
from xlashard._jax import private
type Alias = core.Alias
class A:
    def f(self):
        return core.Jaxpr.eqns, lambda: m.ir.Value, private.core.Var
g = find_name(core, "maybe")
replace_name(m, "lower", None)
"""
    assert uses_in(code).found == [
        ("jax._src.core", "Jaxpr", "a.py: A.f", False),
        ("jax.mlir", "ir", "a.py: A.f", False),
        ("jax._src.core", "Var", "a.py: A.f", False),
        ("jax._src.core", "maybe", "a.py", True),
        ("jax.mlir", "lower", "a.py", False),
    ]


@pytest.mark.parametrize(
    "code", ["core.foo = 1", "setattr(core, 'foo', 1)", "hasattr(core, 'foo')", "del core.foo"]
)
def test_uses_that_do_not_reach_jax_are_found(code: str) -> None:
    assert len(uses_in(code).wrong) == 1


def test_other_folders_read_no_private_name_of_the_modules_that_legacy_gets() -> None:
    for path in sorted(ROOM.parent.rglob("*.py")):
        if not path.is_relative_to(ROOM):
            assert not find_private_reads(path.read_text("utf-8")), path
    assert find_private_reads("from xlashard._jax.legacy_api import mlir as m\nm._rules") == [
        "_rules"
    ]
    assert find_private_reads("legacy_api.core._eval; legacy_api.core.eval") == ["_eval"]


def find_private_reads(code: str) -> list[str]:
    """Return the attributes that begin with an underscore, of a module of `legacy_api`."""
    if "legacy_api" not in code:
        return []
    tree, modules = ast.parse(code), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "xlashard._jax.legacy_api":
            modules |= {alias.asname or alias.name for alias in node.names}
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(name), attr=attribute) if name in modules:
                found.append(attribute)
            case ast.Attribute(ast.Attribute(ast.Name("legacy_api")), attribute):
                found.append(attribute)
    return [name for name in found if name.startswith("_") and not name.startswith("__")]


def test_signatures_have_neither_annotations_nor_values() -> None:
    def f(x: int, *rest: object, y: float = 2.0, **more: str) -> None: ...

    assert describe_parameters(f) == "(x, *rest, y=..., **more)"
    assert describe_parameters(3) == describe_parameters(names) == ""


def test_missing_and_changed_names_are_reported() -> None:
    gone = PrivateName("jax._src.core", "no_such_name", ("a.py: f",))
    rare = PrivateName("jax._src.core", "no_such_name", ("a.py: f",), optional=True)
    changed = PrivateName("jax._src.core", "typematch", ("a.py: f",), signature="(a)")
    first, second, third = find_differences([gone, rare, changed])
    assert (first.breaks, second.breaks, third.breaks) == (True, False, False)
    assert str(first) == "missing: jax._src.core.no_such_name (used by a.py: f)"
    assert "typematch(a) is now (t1, t2" in str(third)


def test_list_is_read_back(tmp_path) -> None:
    path = tmp_path / "names.toml"
    entries = list(read_list().values())[:20]
    path.write_text(to_toml(entries), "utf-8")
    assert list(read_list(path).values()) == entries
    assert list(read_list(path).values())[-1].users == entries[-1].users
