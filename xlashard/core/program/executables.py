"""Loaded executables: the cache that programs share, and the shardings that the compiler chose.

The cache is keyed by the compiler's input: programs of equal text share an executable. The key
of a trace contains more than reaches the program: a mesh or setting that the function never reads
causes another trace. Its module is equal, and the executable is shared.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from xlashard._jax.runtime import compiler, executables
from xlashard._jax.runtime.global_state import cleared_with_jax
from xlashard._jax.runtime.shardings import read_reduction, reduction_arguments, tile_texts
from xlashard.core.program.plan import ProgramPlan, ValuePlan
from xlashard.core.sharding import (
    Mesh,
    NamedSharding,
    XLACompatibleSharding,
    from_hlo,
)
from xlashard.errors import CompileError
from xlashard.geometry import TileAssignment, Tiling
from xlashard.hlo.shapes import HOST
from xlashard.support.lazily import dataclass

if TYPE_CHECKING:
    from xlashard.hlo import module as hlo

type Source = Literal[
    "the compiler",
    "the persistent cache",
    "an equal program",
    "a file",
    "another process",
]
"""Source of a program's executable."""


class LoadedExecutable:
    """A loaded executable, kept alive by its programs.

    Args:
        code: Its bytes, if it was not compiled by this process.

    Attributes:
        executable: The executable; None until `load` makes it.
        module: The module that this process compiled; those of other programs differ in locations.
    """

    __slots__ = ("__weakref__", "_again", "_code", "_lock", "executable", "module")

    def __init__(self, code: bytes | None = None) -> None:
        self.executable: Any = None
        self.module: Any = None
        self._code = code
        self._again: Callable[[], compiler.Executable] | None = None
        self._lock = threading.Lock()

    def load(self, make: Callable[[], compiler.Executable]) -> bool:
        """Load unless this is done, by the first of several threads; return True in this thread.

        An error of `make` leaves it unchanged.
        """
        with self._lock:
            if self.executable is not None:
                return False
            self.executable = make()
            return True

    def take(self, executable: compiler.Executable, code: bytes) -> None:
        """Set the executable that another process has compiled, and its bytes."""
        with self._lock:
            self.executable, self._code = executable, code

    def compile(
        self,
        module: Any,
        request: compiler.CompileRequest,
        in_worker: Callable[[Any, compiler.CompileRequest], tuple[Any, bytes | None]] | None = None,
    ) -> Source:
        """Compile a module unless this is done, and return the source of the executable.

        Args:
            module: The module.
            request: Devices and options.
            in_worker: Returns the executable of devices that are not here, and its bytes.
        """
        source: Source = "an equal program"

        def make() -> compiler.Executable:
            nonlocal source
            with compiler.persistent_cache_hits() as hits:
                if in_worker is not None:
                    executable, self._code = in_worker(module, request)
                else:
                    executable = compiler.compile_module(module, request)
            self.module = module
            source = "the persistent cache" if hits else "the compiler"
            if hits and compiler.drops_cached_code(request):
                self._again = partial(compiler.compile_uncached, module, request)
            return executable

        self.load(make)
        return source

    def to_bytes(self) -> bytes:
        """Return the bytes from which PJRT loads it.

        Raises:
            RuntimeError: The platform's plugin has no bytes.
        """
        if self._code is not None:
            return self._code
        executable = self.executable if self._again is None else self._again()
        return executables.to_bytes(executable)

    def shardings(self, of: "Side", count: int) -> Sequence[str] | None:
        """Return the propagated shardings."""
        return compiler.reported_shardings(self.executable, of, count)

    def memory_kinds(self, count: int) -> Sequence[str | None]:
        """Return the memory of each result."""
        return compiler.output_memory_kinds(self.executable, count)


class ExecutableCache:
    """Cache of live executables, keyed by a digest of the compiler's input."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_text: weakref.WeakValueDictionary[Any, LoadedExecutable] = (
            weakref.WeakValueDictionary()
        )

    def slot(self, key: Any) -> LoadedExecutable:
        """Return the entry of a key, which may still be empty."""
        with self._lock:
            loaded = self._by_text.get(key)
            if loaded is None:
                loaded = self._by_text[key] = LoadedExecutable()
            return loaded

    def forget(self, chosen: LoadedExecutable) -> None:
        """Remove an executable from the cache; programs that have it keep it."""
        with self._lock:
            for key, loaded in list(self._by_text.items()):
                if loaded is chosen:
                    del self._by_text[key]

    def cache_clear(self) -> None:
        """Remove all executables from the cache."""
        with self._lock:
            self._by_text = weakref.WeakValueDictionary()

    def __len__(self) -> int:
        with self._lock:
            return len(self._by_text)


EXECUTABLES = cleared_with_jax(ExecutableCache())
"""The shared executables of this process."""

type Shardings = tuple[XLACompatibleSharding, ...]
type Side = Literal["parameters", "outputs"]


def resolve_shardings(
    chosen: "PropagatedShardings", plan: ProgramPlan, tokens: int
) -> tuple[Shardings, Shardings]:
    """Return the sharding of every argument and result: the requested or the propagated one.

    Args:
        chosen: Reader of the propagated shardings.
        plan: Plan of the program.
        tokens: Number of ordering tokens before the arguments and the results.

    Raises:
        CompileError: The compiler reports no shardings, or one that no array can have.
    """
    args, results = _fully_requested(plan.args), _fully_requested(plan.results)
    if args is None:
        texts = _reported(chosen, "parameters", plan, tokens)
        args = _chosen_shardings(plan, plan.args, texts, [v.memory_kind for v in plan.args])
    if results is None:
        kinds = chosen.memory_kinds(len(plan.results) + tokens)[tokens:]
        texts = _reported(chosen, "outputs", plan, tokens)
        results = _chosen_shardings(plan, plan.results, texts, kinds)
    return args, results


def _fully_requested(values: Sequence[ValuePlan]) -> Shardings | None:
    """Return the requested shardings, if the partitioner chose none of them."""
    known = [v.sharding for v in values if v.sharding is not None and not v.is_free]
    return tuple(known) if len(known) == len(values) else None


def _reported(
    chosen: "PropagatedShardings", of: Side, plan: ProgramPlan, tokens: int
) -> Sequence[str]:
    count = len(plan.args if of == "parameters" else plan.results)
    if len(plan.devices) == 1:
        # The partitioner did not run.
        return ["{replicated}"] * count
    texts = chosen.shardings(of, count + tokens)
    if texts is None:
        raise CompileError(  # no-catalogue: no supported compiler does this
            f"the compiler does not report the shardings of the {of} of "
            f"{plan.function_name}: specify explicit shardings"
        )
    return texts[tokens:]


def _chosen_shardings(
    plan: ProgramPlan,
    values: Sequence[ValuePlan],
    texts: Sequence[str],
    kinds: Sequence[str | None],
) -> Shardings:
    known: dict[Any, XLACompatibleSharding] = {}  # most values have one of few shardings
    shardings = []
    for value, text, kind in zip(values, texts, kinds, strict=True):
        sharding = value.sharding if value.is_settled else None
        if sharding is None:
            key = text, kind, value.sharding, len(value.shape), value.trailing
            sharding = known.get(key)
            if sharding is None:
                sharding = known[key] = _parsed_sharding(text, plan, value, kind)
        shardings.append(sharding)
    return tuple(shardings)


def _parsed_sharding(
    text: str, plan: ProgramPlan, value: ValuePlan, kind: str | None
) -> XLACompatibleSharding:
    if len(plan.devices) == 1:
        return value.sharding or plan.replicated(kind)
    if value.trailing:
        text = _logical_text(text, plan, value)
    sharding = from_hlo(text, plan.devices, _mesh(plan, value), kind)
    if not isinstance(sharding, XLACompatibleSharding):
        # no-catalogue: no supported compiler does this
        raise CompileError(f"the compiler sharded {value.name} of {plan.function_name} as {text}")
    return _with_reductions(sharding, value.sharding)


def _with_reductions(
    sharding: XLACompatibleSharding, requested: XLACompatibleSharding | None
) -> XLACompatibleSharding:
    """Return the propagated sharding with the reductions of the request, which HLO leaves out."""
    if not isinstance(sharding, NamedSharding) or not isinstance(requested, NamedSharding):
        return sharding
    spec = requested.spec
    if not (spec.unreduced or spec.reduced):
        return sharding
    reductions = reduction_arguments(spec.unreduced, spec.reduced, read_reduction(spec))
    return sharding.with_spec(sharding.spec.update(**reductions))


def _mesh(plan: ProgramPlan, value: ValuePlan) -> Mesh | None:
    """Return the mesh that names the axes: that of the value's own spec, if any."""
    sharding = value.sharding
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return sharding.mesh
    return plan.mesh


def _logical_text(text: str, plan: ProgramPlan, value: ValuePlan) -> str:
    """Return the tiles without trailing dimensions of the buffers."""
    tiling = Tiling.from_tile_assignment(
        TileAssignment.parse_text(text), value.physical_ndim, num_devices=len(plan.devices)
    )
    ndim = len(value.shape)
    if any(count > 1 for count in tiling.counts[ndim:]):
        raise CompileError(  # no-catalogue: no supported compiler does this
            f"the compiler sharded the elements of {value.name} ({value.dtype}) of "
            f"{plan.function_name}, {text}: specify an explicit sharding"
        )
    return replace(tiling, counts=tiling.counts[:ndim]).to_tile_assignment().to_text()


@dataclass(frozen=True)
class HloShardings:
    """Propagated shardings, read from the HLO of a program without an executable.

    Attributes:
        module: The compiled module.
    """

    module: "hlo.HloModule"

    def shardings(self, of: Side, count: int) -> Sequence[str] | None:
        """Return the propagated shardings."""
        if self.module.shardings is None:
            return None
        arguments, result = self.module.shardings
        texts = arguments if of == "parameters" else (result,)
        texts = [tile for text in texts for tile in tile_texts(text)]
        return texts if len(texts) == count else None

    def memory_kinds(self, count: int) -> Sequence[str | None]:
        """Return the memory of each result."""
        result = self.module.result
        kinds = [
            "pinned_host" if any(a.memory_space == HOST for a in part.arrays) else None
            for part in (() if result is None else result.parts)
        ]
        return kinds if len(kinds) == count else [None] * count


type PropagatedShardings = LoadedExecutable | HloShardings
"""Reader of the propagated shardings of a program."""
