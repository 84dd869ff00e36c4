"""Types of Arrays in the stub are right and complete."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from tests.typing import arrays, functions, numpy_functions
from xlashard import Array
from xlashard._jax.runtime.transfer import HandleType

ROOT = Path(__file__).resolve().parent.parent
STUB = ROOT / "xlashard" / "core" / "array" / "array_class" / "typed.pyi"


@pytest.mark.slow
def test_pyright_accepts_typical_user_code() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "tests/typing"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("module", [arrays, functions, numpy_functions])
def test_typed_modules_run(module) -> None:
    module.run()


# Parameters that are newer than the oldest supported JAX.
NEWER = {"strategy"}


def members(name: str) -> dict[str, ast.FunctionDef]:
    """Return the functions of a class of the stub."""
    (kind,) = [
        node
        for node in ast.parse(STUB.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    return {node.name: node for node in kind.body if isinstance(node, ast.FunctionDef)}


def is_property(function: ast.FunctionDef) -> bool:
    return any(getattr(mark, "id", "") == "property" for mark in function.decorator_list)


def public(names: object) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def parameters(function: ast.FunctionDef) -> tuple[list[str], list[str]]:
    """Return names of positional parameters (with * for all of them) and of keyword-only ones."""
    arguments = function.args
    by_position = [a.arg for a in (*arguments.posonlyargs, *arguments.args)][1:]
    if arguments.vararg:
        by_position.append(f"*{arguments.vararg.arg}")
    return by_position, [a.arg for a in arguments.kwonlyargs]


def real_parameters(function: object) -> tuple[list[str], list[str]]:
    by_position, by_name = [], []
    for name, parameter in list(inspect.signature(function).parameters.items())[1:]:
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            by_position.append(f"*{name}")
        elif parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            by_name.append(name)
        else:
            by_position.append(name)
    return by_position, by_name


METHODS = {n: f for n, f in members("Typed").items() if n in public([n]) and not is_property(f)}
UPDATES = {n: f for n, f in members("_PartUpdates").items() if n in public([n])}


@pytest.mark.parametrize("name", METHODS)
def test_methods_have_the_parameters_of_jax(name: str) -> None:
    assert parameters(METHODS[name]) == real_parameters(getattr(HandleType, name))
    assert callable(getattr(Array, name))


@pytest.mark.parametrize("name", UPDATES)
def test_updates_have_the_parameters_of_jax(name: str) -> None:
    real = real_parameters(getattr(type(jax.numpy.zeros(1).at[0]), name))
    by_position, by_name = parameters(UPDATES[name])
    assert by_position == real[0]
    assert [n for n in by_name if n in real[1] or n not in NEWER] == real[1]


def _is_ours(member: object) -> bool:
    return inspect.isfunction(member) and (member.__module__ or "").startswith("xlashard")


def test_stub_covers_every_member_of_jax_arrays() -> None:
    """`Array` has every public member of JAX's arrays: in the stub, or written out."""
    stub = set(members("Typed"))
    written = {
        name
        for kind in Array.__mro__
        if kind.__module__.startswith("xlashard")
        for name, member in vars(kind).items()
        if isinstance(member, property) or _is_ours(member)
    }
    assert public(dir(jax.Array)) <= stub | written
    # The stub lists members that a loop copies from JAX: they are declared nowhere else.
    for name in public(dir(HandleType)):
        member = getattr(HandleType, name)
        if inspect.isfunction(member) and name in public(dir(Array)):
            assert name in stub or name in written, name
    assert not public(stub) - public(dir(Array))


def test_every_operator_is_in_the_stub() -> None:
    special = set(members("Typed")) - public(members("Typed"))
    assert all(hasattr(Array, name) for name in special)
    arithmetic = {n for n in vars(HandleType) if n.startswith("__r") and n[3:-2] != "epr__"}
    assert len(special) > 40 and "__rmatmul__" in special & arithmetic


def test_stub_of_functions_returns_arrays_of_this_package() -> None:
    """In step with JAX's stub: `xlashard/numpy/_typed.pyi` has all functions that return arrays."""
    theirs: dict[str, list[str]] = {}
    for node in ast.parse(Path(jax.numpy.__file__).with_suffix(".pyi").read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.returns:
            theirs.setdefault(node.name, []).append(ast.unparse(node.returns))
        elif isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "BinaryUfunc":
            theirs[ast.unparse(node.target)] = ["BinaryUfunc"]
    stub = ast.parse((ROOT / "xlashard" / "numpy" / "_typed.pyi").read_text(encoding="utf-8"))
    listed, binary = set(), set()
    for node in stub.body:
        if isinstance(node, ast.Assign):
            (name,) = map(ast.unparse, node.targets)
            assert ast.unparse(node.value) == f"_giving_arrays(_jnp.{name})"
            listed.add(name)
        elif isinstance(node, ast.AnnAssign):
            binary.add(ast.unparse(node.target))
    ours_by_hand = {"from_dlpack"}
    assert {n for n, given in theirs.items() if given == ["Array"]} <= listed | ours_by_hand
    assert all(theirs.get(name, ["Array"]) == ["Array"] for name in listed)
    assert binary == {n for n, given in theirs.items() if given == ["BinaryUfunc"]}
