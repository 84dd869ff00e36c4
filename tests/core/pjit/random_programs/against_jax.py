"""Compare programs under `xlashard.jit` and under `jax.jit`, on the same mesh."""

from dataclasses import replace
from typing import Any

import jax

from tests.core.pjit.random_programs.checking import Failure, Wrong, compare, first_line
from tests.core.pjit.random_programs.environment import Library, jax_sharded, xlashard_sharded
from tests.core.pjit.random_programs.running import (
    CALLS_OF_TREES,
    make_mesh,
    read_header,
    run,
    under,
)

ACCEPTED, REFUSED = "accepted", "refused"


def find_difference(
    text: str, partitioner: str | None = None, *, classes: bool = False
) -> Failure | None:
    """Run a program under both libraries, and return their first difference.

    Refusals are compared, and trees, dtypes, weak types, values and types of results. Shardings
    are compared if the program is called without a transformation, within which JAX and xlashard
    split a program into different parts, and closes over no sharded array, which is a constant to
    JAX and an argument here.

    Args:
        text: The program.
        partitioner: Partitioner to use instead of the one in the text.
        classes: Compare the classes of errors too.
    """
    header = read_header(text)
    mesh = make_mesh(header)
    # jax.jit takes no notice of `with mesh:`.
    manner = "set_mesh" if header.manner == "with" else header.manner
    named = manner == "named"
    exact = header.call in CALLS_OF_TREES and "table(" not in text
    bare = header.call not in CALLS_OF_TREES and header.bare
    with under(partitioner or header.partitioner):
        libraries = jax_sharded(mesh, named), xlashard_sharded(mesh, named, as_jax=True)
        (theirs, freed), (ours, ours_freed) = (
            _outcome(text, library, mesh, manner, bare=bare) for library in libraries
        )
        if isinstance(theirs, Exception) or isinstance(ours, Exception):
            if bare and _refuses_cotangent(theirs):
                return None
            return _compare_refusals(ours, theirs) or (
                _compare_classes(ours, theirs) if classes else None
            )
        try:
            for mine, right in zip(ours, theirs, strict=True):
                compare(mine, right)
                _compare_places(mine, right, exact=exact)
            if bare and ours_freed != freed:
                raise Wrong("donation", f"deleted arguments: {ours_freed} instead of {freed}")
        except Wrong as wrong:
            return Failure(wrong.failure.kind, wrong.failure.message, "the other value")
    return None


def _outcome(
    text: str, library: Library, mesh: Any, manner: str, *, bare: bool
) -> tuple[Any, list[bool]]:
    """Return the results of a program or the error that refused it, and which arguments it freed.

    Args:
        text: The program.
        library: Source of its functions.
        mesh: The mesh in force.
        manner: How the mesh is specified.
        bare: Transform the compiled function without a `jax.jit` around it, which alone decides
            about donation and about committed arguments.
    """
    placed: list[Any] = []

    def put(x: Any, spec: Any) -> Any:
        placed.append(library.put(x, spec))
        return placed[-1]

    whole = (lambda fun: fun) if bare else library.whole
    try:
        results = run(text, replace(library, put=put, whole=whole), mesh, manner)
    except Exception as error:
        results = error
    return results, [isinstance(x, jax.Array) and x.is_deleted() for x in placed]


def _compare_refusals(ours: Any, theirs: Any) -> Failure | None:
    if not isinstance(theirs, Exception):
        return Failure(REFUSED, first_line(ours), "accepts it")
    if isinstance(theirs, NameError | AttributeError | RecursionError):
        return Failure("program", "it runs nowhere", first_line(theirs))
    if isinstance(theirs, jax.errors.JaxRuntimeError):
        return None  # XLA failed on a program that JAX accepts
    if not isinstance(ours, Exception):
        return Failure(ACCEPTED, "it runs", f"raises {first_line(theirs)}")
    return None


def _refuses_cotangent(error: Any) -> bool:
    """Return True for JAX's refusal of a committed argument, by which it may mean a cotangent.

    Those that lie elsewhere than `out_shardings` are moved here.
    """
    return isinstance(error, ValueError) and "does not match the sharding" in str(error)


def _compare_classes(ours: Any, theirs: Any) -> Failure | None:
    """Compare the builtin classes from which the errors derive."""
    builtin = next(c for c in type(theirs).__mro__ if c.__module__ == "builtins")
    # Assertions and missing attributes are accidents of JAX; its own errors come from tracing.
    is_of_jax = type(ours).__module__.partition(".")[0] == "jax"
    if builtin not in (ValueError, TypeError, KeyError) or is_of_jax or isinstance(ours, builtin):
        return None
    return Failure(f"no {builtin.__name__}", first_line(ours), f"raises {first_line(theirs)}")


def _compare_places(got: Any, wanted: Any, *, exact: bool) -> None:
    """Compare types, and with `exact` shardings and commitment to devices."""
    leaves = zip(jax.tree_util.tree_flatten_with_path(got)[0], jax.tree.leaves(wanted), strict=True)
    for (path, mine), right in leaves:
        name = "result" + jax.tree_util.keystr(path)
        if _is_named(right) and jax.typeof(mine) != jax.typeof(right):
            mesh = jax.typeof(mine).sharding, jax.typeof(right).sharding
            raise Wrong("types", f"{name}: {jax.typeof(mine)}, {mesh[0]} instead of {mesh[1]}")
        if exact and not _is_same_place(mine, right):
            raise Wrong("shardings", f"{name}: {mine.sharding} instead of {right.sharding}")
        if exact and mine.committed != right.committed:
            raise Wrong("committed", f"{name}: {mine.committed} instead of {right.committed}")


def _is_same_place(mine: Any, right: Any) -> bool:
    """Compare shardings; by their tiles where JAX has no names for them."""
    if _is_named(right):
        return mine.sharding == right.sharding
    return mine.sharding.is_equivalent_to(right.sharding, right.ndim)


def _is_named(x: Any) -> bool:
    return isinstance(x.sharding, jax.sharding.NamedSharding | jax.sharding.SingleDeviceSharding)
