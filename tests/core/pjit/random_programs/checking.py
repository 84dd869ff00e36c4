"""Compare results of a program under pjit with its results under JAX on one device."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

import xlashard
from tests.core.pjit.random_programs.environment import (
    Library,
    jax_sharded,
    plain,
    xlashard_sharded,
)
from tests.core.pjit.random_programs.running import (
    Module,
    is_key,
    is_unreduced,
    make_mesh,
    read_header,
    read_value,
    run,
    under,
)

# Bound of rounding errors in a handful of operations, relative to the largest element.
TOLERANCE = {"float32": 2e-4, "complex64": 5e-4, "bfloat16": 0.08, "float16": 0.01}


# JAX's error for a result that GSPMD has sharded unevenly. A transformation around a pjit may raise
# it, with jax.jit as well.
INDIVISIBLE = "raises IndivisibleError"


XLA = "xla"
"""Kind of a failure that `jax.jit` on the same mesh shares: a fault of XLA or of JAX."""

SAME_DEVICES = "same devices"
"""Outcome of JAX where only the devices were in question."""


@dataclass(frozen=True)
class Failure:
    """Failure of a program.

    Attributes:
        kind: Kind of failure, such as `values`; a smaller program must fail with the same kind.
        message: The difference.
        jax: Outcome of JAX with the same shardings: "right", "wrong too, ...", or its error.
    """

    kind: str
    message: str
    jax: str = ""

    @property
    def is_of_jax(self) -> bool:
        """True if jax.jit fails as well."""
        return self.jax.startswith(("wrong too", "raises"))

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}\n(jax.jit with the same shardings: {self.jax})"


class Wrong(Exception):
    """Difference that ends a comparison."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.failure = Failure(kind, message)


def find_failure(text: str, partitioner: str | None = None) -> Failure | None:
    """Run a program under pjit and on one device, and return their first difference.

    The kind is `XLA` if `jax.jit` on the same mesh gives the same wrong values or the same error.

    Args:
        text: The program.
        partitioner: Partitioner to use instead of the one in the text.
    """
    header = read_header(text)
    mesh = make_mesh(header)
    with under(partitioner or header.partitioner):
        try:
            wanted = run(text, plain())
        except Exception as error:
            return Failure("program", f"it does not run on one device: {first_line(error)}")
        got: list[Any] = []
        try:
            got = _run_pjit(text, mesh, header)
            _check(text, got, mesh, header, wanted)
        except Wrong as wrong:
            failure = _with_jax(wrong.failure, text, mesh, wanted, got)
            return None if _is_excused(failure, header) else failure
    return None


def _is_excused(failure: Failure, header: Module) -> bool:
    """Return True if JAX refuses the program for a known reason, or places it alike."""
    theirs = failure.jax.split(":")[0]
    if failure.kind == "devices":
        return theirs == SAME_DEVICES  # an unused committed argument determines no devices
    if header.explicit and failure.kind.startswith("raises"):
        return theirs.startswith("raises")  # types on explicit axes refuse much
    return failure.kind == theirs == INDIVISIBLE


def _run_pjit(text: str, mesh: Any, header: Module) -> list[Any]:
    try:
        return run(text, xlashard_sharded(mesh, header.manner == "named"), mesh)
    except Exception as error:
        raise Wrong(f"raises {type(error).__name__}", str(error)[:2000]) from error


def _check(text: str, got: list[Any], mesh: Any, header: Module, wanted: list[Any]) -> None:
    for each, right in zip(got, wanted, strict=True):
        compare(each, right)
        for path, leaf in jax.tree_util.tree_flatten_with_path(each)[0]:
            _check_shards("result" + jax.tree_util.keystr(path), leaf)
    if header.call in ("call", "lower", "anew"):
        # The enclosing calls decide the results and their shardings.
        _check_class(got)
        ours = xlashard_sharded(mesh, header.manner == "named")
        asked = requested_specs(Module.read(text, ours).options["out_shardings"], got[0])
        for each in got:
            _check_places(each, asked, mesh, header.call != "anew" and _determines_devices(header))


def _with_jax(failure: Failure, text: str, mesh: Any, wanted: list[Any], got: list[Any]) -> Failure:
    """Add the outcome of JAX on the same mesh to a failure.

    Args:
        failure: The failure.
        text: The program.
        mesh: The mesh.
        wanted: Results on one device.
        got: Results under pjit; empty if it raised an error.
    """
    around = jax_sharded(mesh, as_pjit=True)
    bare = replace(around, whole=lambda fun: fun)
    # Types on explicit axes depend on the mesh in force, so it is the one of our run.
    in_force = mesh if mesh.explicit_axes else None
    outcome, theirs = _outcome_of_jax(text, bare, wanted, in_force)
    # Without a jit around it JAX refuses much of a transformed program, for reasons of its own; on
    # explicit axes they are those of both.
    if not outcome.startswith("wrong too") and not mesh.explicit_axes:
        outcome, theirs = _outcome_of_jax(text, around, wanted)
    is_shared = outcome == f"{failure.kind}: {failure.message[:_SHOWN]}"
    if failure.kind in (_RUNTIME_ERROR, "raises CompileError"):
        is_shared = outcome.startswith(_RUNTIME_ERROR)
    if failure.kind == "values" and outcome.startswith("wrong too"):
        is_shared = _are_equal(got, theirs)
    if failure.kind == "devices":
        # None means unspecified here: as P(), it would name the devices of the mesh.
        _, theirs = _outcome_of_jax(text, jax_sharded(mesh), wanted)
        outcome = SAME_DEVICES if _device_sets(got) == _device_sets(theirs) else outcome
    return Failure(XLA if is_shared else failure.kind, failure.message, outcome)


def _device_sets(results: list[Any]) -> list[set[jax.Device]]:
    return [leaf.devices() for leaf in jax.tree.leaves(results)]


_SHOWN = 300

_RUNTIME_ERROR = f"raises {jax.errors.JaxRuntimeError.__name__}"


def _outcome_of_jax(
    text: str, library: Library, wanted: list[Any], mesh: Any = None
) -> tuple[str, list[Any]]:
    """Return the outcome of JAX, as a text, and its results."""
    results: list[Any] = []
    try:
        results = run(text, library, mesh)
        for each, right in zip(results, wanted, strict=True):
            compare(each, right)
    except Wrong as wrong:
        return f"wrong too, {wrong.failure.message}", results
    except Exception as error:
        return f"raises {first_line(error)}", results
    return "right", results


def _are_equal(got: list[Any], theirs: list[Any]) -> bool:
    try:
        for mine, other in zip(got, theirs, strict=True):
            compare(mine, other)
    except (Wrong, ValueError):
        return False
    return True


def first_line(error: Exception) -> str:
    """Return the class and the beginning of an error."""
    return f"{type(error).__name__}: {str(error)[:_SHOWN]}"


def compare(got: Any, wanted: Any) -> None:
    """Compare trees, dtypes and values."""
    trees = jax.tree.structure(got), jax.tree.structure(wanted)
    if trees[0] != trees[1]:
        raise Wrong("tree", f"{trees[0]} instead of {trees[1]}")
    leaves = zip(jax.tree_util.tree_flatten_with_path(got)[0], jax.tree.leaves(wanted), strict=True)
    for (path, ours), right in leaves:
        _compare_leaf("result" + jax.tree_util.keystr(path), ours, right)


def _compare_leaf(path: str, got: Any, wanted: Any) -> None:
    if (got.shape, got.dtype) != (wanted.shape, wanted.dtype):
        raise Wrong("type", f"{path} is {got.aval}, on one device {wanted.aval}")
    if not is_key(wanted) and got.weak_type != wanted.weak_type:
        raise Wrong("weak type", f"{path}: {got.weak_type} instead of {wanted.weak_type}")
    got, wanted = read_value(got), read_value(wanted)
    if got.shape != wanted.shape:
        raise Wrong("values", f"{path} has shards of {got.shape}, on one device {wanted.shape}")
    close = _close(got, wanted)
    if close.all():
        return
    first = tuple(int(i) for i in np.argwhere(~close)[0])
    raise Wrong(
        "values",
        f"{path} {wanted.dtype}{list(wanted.shape)} differs in {(~close).sum()} elements of "
        f"{close.size}, first at {first}: {got[first]} instead of {wanted[first]}",
    )


def _close(got: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return a mask of the elements that are equal up to rounding."""
    dtype = str(wanted.dtype)
    if dtype not in TOLERANCE:
        return np.asarray(got == wanted)
    wide = np.complex128 if dtype == "complex64" else np.float64
    got, wanted = got.astype(wide), wanted.astype(wide)
    finite = wanted[np.isfinite(wanted)]
    scale = max(1.0, float(np.abs(finite).max(initial=0.0)))
    return np.isclose(got, wanted, rtol=0, atol=TOLERANCE[dtype] * scale, equal_nan=True)


def _check_class(got: Any) -> None:
    for leaf in jax.tree.leaves(got):
        if not is_key(leaf) and not isinstance(leaf, xlashard.Array):
            raise Wrong("type", f"a result is a {type(leaf).__name__}")


def _check_shards(path: str, x: Any) -> None:
    """Check that shards have the shape of the sharding, and make up the value."""
    if is_unreduced(x):
        return  # they add up to it, and the value was compared before
    indices = x.sharding.devices_indices_map(x.shape)
    if set(indices) != x.sharding.device_set or set(indices) != x.devices():
        raise Wrong("devices", f"{path}: {x.sharding} is not on {x.devices()}")
    value, seen = read_value(x), np.zeros(x.shape, int)
    replicas: dict[str, set[int]] = {}
    shards = xlashard.key_shards(x) if is_key(x) else x.addressable_shards
    for shard in shards:
        if shard.data.shape != x.sharding.shard_shape(x.shape):
            raise Wrong(
                "shards",
                f"{path}: a shard of {shard.data.shape}, expected "
                f"{x.sharding.shard_shape(x.shape)} of {x.shape} under {x.sharding}",
            )
        if indices[shard.device] != shard.index:
            raise Wrong("shards", f"{path}: {shard.index}, not {indices[shard.device]}")
        if not np.array_equal(
            read_value(shard.data), value[shard.index], equal_nan=_has_nan(value)
        ):
            raise Wrong("shards", f"{path}: shard {shard.index} is not that piece of the value")
        replicas.setdefault(str(shard.index), set()).add(shard.replica_id)
        seen[shard.index] += 1
    if not x.size:
        return  # all its pieces are alike, whichever they are
    count = len(shards) // len(replicas)
    if not (seen == count).all():
        raise Wrong("shards", f"{path}: pieces do not cover it, {x.sharding}")
    if any(ids != set(range(len(ids))) or len(ids) != count for ids in replicas.values()):
        raise Wrong("shards", f"{path}: replicas {replicas}")


def _has_nan(value: np.ndarray) -> bool:
    return value.dtype.kind in "fcV" and str(value.dtype) != "bool"


@dataclass(frozen=True)
class _Requested:
    """Requested placement of a result: a spec, REPLICATED on any devices, or None."""

    spec: Any


REPLICATED = "replicated"


def requested_specs(out_shardings: Any, out: Any) -> list[Any]:
    """Return the requested spec of each result, or None."""

    def is_leaf(x: Any) -> bool:
        return x is None or isinstance(x, jax.sharding.Sharding | jax.sharding.PartitionSpec)

    asked = jax.tree.map(_as_spec, out_shardings, is_leaf=is_leaf)
    return [leaf.spec for leaf in jax.tree.leaves(jax.tree.broadcast(asked, out))]


def _as_spec(leaf: Any) -> _Requested:
    if leaf is None:
        return _Requested(REPLICATED)
    if isinstance(leaf, jax.sharding.Sharding):
        return _Requested(leaf.spec)
    return _Requested(leaf if isinstance(leaf, jax.sharding.PartitionSpec) else None)


def _determines_devices(header: Module) -> bool:
    """Return True if an argument determines the devices of the program."""
    return any(spec is not None for spec in header.placed)


def _check_places(out: Any, asked: list[Any], mesh: Any, placed: bool) -> None:
    """Check that each result is on the mesh, and placed as requested."""
    leaves = jax.tree_util.tree_flatten_with_path(out)[0]
    for (path, x), spec in zip(leaves, asked, strict=True):
        name = "result" + jax.tree_util.keystr(path)
        on_mesh = set(mesh.devices.flat)
        requested = any(s not in (None, REPLICATED) for s in asked)
        if (placed or requested) and x.devices() != on_mesh:
            raise Wrong("devices", f"{name} is on {x.devices()}, not on the mesh")
        if spec == REPLICATED and not x.sharding.is_fully_replicated:
            raise Wrong("places", f"{name} was to be replicated, and is {x.sharding}")
        if spec is not None and spec != REPLICATED:
            _check_spec(name, x, spec, mesh)


def _check_spec(name: str, x: Any, spec: Any, mesh: Any) -> None:
    if spec.unreduced:
        if x.sharding.spec.unreduced != spec.unreduced:
            raise Wrong("places", f"{name} was to be {spec}, and is {x.sharding}")
        return
    wanted = jax.sharding.NamedSharding(mesh, spec).devices_indices_map(x.shape)
    for device, index in x.sharding.devices_indices_map(x.shape).items():
        for i, length in enumerate(x.shape):
            if index[i].indices(length) != wanted[device][i].indices(length):
                raise Wrong("places", f"{name} of {x.shape} was to be {spec}, and is {x.sharding}")
