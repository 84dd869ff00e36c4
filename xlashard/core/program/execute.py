"""Execution of compiled programs on buffer handles."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from xlashard._jax import stablehlo_modules as modules
from xlashard._jax.lowering import LoweredBody
from xlashard._jax.runtime import compiler, dispatch, executables, execute, run_checks
from xlashard._jax.runtime.shardings import is_compile_only, layout_text
from xlashard._jax.runtime.topologies import compile_only_error
from xlashard._jax.runtime.transfer import shared_pair
from xlashard.core.program.consistency import CONSISTENCY
from xlashard.core.program.donation import UnusedDonation, find_unused, local_bytes, sum_known
from xlashard.core.program.executables import LoadedExecutable, Source
from xlashard.core.program.lowered import LoweredProgram
from xlashard.core.program.plan import ProgramPlan, ValuePlan
from xlashard.core.sharding import XLACompatibleSharding
from xlashard.errors import UnreducedError
from xlashard.support.lazily import dataclass, deferred

if TYPE_CHECKING:
    from xlashard.core.program.consistency.fingerprint import (
        ProcessCopies,
        ProgramFingerprint,
        ValueNamer,
    )
    from xlashard.hlo import module as hlo
else:
    hlo = deferred("xlashard.hlo.module")

type Handle = compiler.Handle


@dataclass(eq=False)
class CompiledProgram:
    """A compiled program over a fixed list of devices, and how arguments reach it.

    Attributes:
        loaded: PJRT's loaded executable, which equal programs share.
        plan: Its plan.
        in_shardings: The sharding of each argument, with propagated ones.
        out_shardings: The sharding of each result, with propagated ones.
        in_avals: The abstract values of the arguments.
        out_avals: The abstract values of the results.
        committed: Whether the results are committed to their devices.
        body: The module, and objects that live as long as the program.
        kept: For each argument of a call, True if the program takes it.
        request: Its compile request; None for a program from a file.
        source: Source of its executable.
        fingerprint: Its fingerprint until its processes have compared it; None for a program of
            one process.
        saved_digest: Digest of the module of a program from a file.
        consts: Handles of the hoisted values, placed as its first arguments; references unchanged.
        written: For each of the last results the reference that it is written to: a reference that
            the function closes over, or the position of an argument.
        stateful: True if it takes references, or takes or returns tokens, which jaxlib's
            dispatcher does not support.
        lowered: Its module; None for a program that was loaded from a file.
    """

    loaded: LoadedExecutable
    plan: ProgramPlan
    in_shardings: tuple[XLACompatibleSharding, ...]
    out_shardings: tuple[XLACompatibleSharding, ...]
    in_avals: tuple[Any, ...]
    out_avals: tuple[Any, ...]
    committed: bool
    body: LoweredBody
    kept: tuple[bool, ...]
    request: compiler.CompileRequest | None = None
    source: Source = "the compiler"
    fingerprint: "ProgramFingerprint | None" = None
    saved_digest: str = ""
    consts: tuple[Any, ...] = ()
    written: tuple[Any, ...] = ()
    stateful: bool = False
    lowered: LoweredProgram | None = None

    @property
    def executable(self) -> compiler.Executable:
        """Return PJRT's executable."""
        return self.loaded.executable

    def argument_paths(self, paths: Sequence[str], name: str) -> list[str]:
        """Return the path of each argument of the program.

        Args:
            paths: The path of each argument of the call.
            name: The function.
        """
        return [f"an array that {name} closes over"] * len(self.consts) + [
            path for path, kept in zip(paths, self.kept, strict=True) if kept
        ]

    @property
    def requested_in_shardings(self) -> tuple[XLACompatibleSharding | None, ...]:
        """Return the sharding of each argument; None for one that the partitioner chose."""
        pairs = zip(self.in_shardings, self.plan.args, strict=True)
        return tuple([None if plan.is_free else sharding for sharding, plan in pairs])

    @property
    def name(self) -> str:
        """Return the function's name."""
        return self.plan.function_name

    def report_donation(self, mode: str, function: str) -> None:
        """Report donations that the compiler left unused; see `LoweredProgram.report_donation`."""
        if self.lowered is not None and any(self.plan.donated):
            self.lowered.report_donation(mode, function, self._left_donations(self.lowered))

    def _left_donations(self, lowered: LoweredProgram) -> list[UnusedDonation]:
        """Return the refusals of donated arguments that the compiler left unused."""
        donation = lowered.donation
        if len(donation.certain) == len(donation.pairs):
            return []
        args, shardings = lowered.plan.args, self.in_shardings
        offered = sum_known([local_bytes(args[i], shardings[i]) for i in donation.pairs])
        if compiler.alias_bytes(self.executable) in (None, offered):
            return []
        ins = map(layout_text, self.in_layouts, [aval.dtype for aval in self.in_avals])
        outs = map(layout_text, self.out_layouts, [aval.dtype for aval in self.out_avals])
        plan = self.plan.settle_values(
            (self.in_shardings, self.out_shardings), (list(ins), list(outs))
        )
        aliases, tokens = executables.aliases(self.executable), len(self.body.ordered_effects)
        unused = find_unused(plan, aliases, tokens)
        return [refused for i, refused in unused.items() if i in donation.pairs]

    def executable_with_lines(
        self, place: "Callable[[Sequence[hlo.Frame]], object]"
    ) -> compiler.Executable:
        """Return the executable, with the source lines of this program's own functions.

        A shared executable has the lines of the module that was compiled first. Another program is
        compiled again for its lines.

        Args:
            place: Returns the relevant location of a call stack, the innermost frame first.
        """
        own, used, request = self.body.module, self.loaded.module, self.request
        executable = self.executable
        if used is not None and used is not own and request is not None:
            stacks = zip(_stacks(own), _stacks(used), strict=True)
            if any(place(own_stack) != place(other) for own_stack, other in stacks):
                executable = compiler.compile_uncached(own, request)
        return executable

    @cached_property
    def in_jax_shardings(self) -> tuple[Any, ...]:
        """Return JAX's own sharding of each argument."""
        return _jax_shardings(self.in_shardings, self.in_avals)

    @cached_property
    def physical_in_shardings(self) -> tuple[Any, ...]:
        """Return JAX's own sharding of each argument's buffers (for keys, of their integers)."""
        if not execute.has_keys(self.in_avals):
            return self.in_jax_shardings
        return tuple(map(execute.physical_sharding, self.in_avals, self.in_jax_shardings))

    @cached_property
    def out_jax_shardings(self) -> tuple[Any, ...]:
        """Return JAX's own sharding of each result, which its handle carries."""
        return _jax_shardings(self.out_shardings, self.out_avals)

    @cached_property
    def _raw_layouts(self) -> tuple[tuple[Any, ...], tuple[Any, ...]] | None:
        raw, tokens = compiler.raw_layouts(self.executable), len(self.body.ordered_effects)
        return None if raw is None else (tuple(raw[0][tokens:]), tuple(raw[1][tokens:]))

    @cached_property
    def full_layouts(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return the layouts of arguments and of results in memory; None where unknown."""
        if self._raw_layouts is None:
            return (None,) * len(self.in_jax_shardings), (None,) * len(self.out_jax_shardings)
        ins, outs = (tuple(map(compiler.layout_from_raw, side)) for side in self._raw_layouts)
        return ins, outs

    @cached_property
    def raw_in_layouts(self) -> tuple[Any, ...]:
        """Return the layout of each argument in the form of a handle's own; None if unknown."""
        raw = self._raw_layouts
        return (None,) * len(self.in_jax_shardings) if raw is None else raw[0]

    @cached_property
    def in_layouts(self) -> tuple[Any, ...]:
        """Return the layout of each argument in memory; None where it is the default one."""
        layouts = self.full_layouts[0]
        return tuple(compiler.dispatch_layouts(layouts, self.in_jax_shardings, self.in_avals))

    @cached_property
    def out_layouts(self) -> tuple[Any, ...]:
        """Return the layout of each result in memory; None where it is the default one."""
        layouts = self.full_layouts[1]
        return tuple(compiler.dispatch_layouts(layouts, self.out_jax_shardings, self.out_avals))

    @cached_property
    def handlers(self) -> list[Any]:
        """Return the function that makes a handle of each result's buffers."""
        make_handler = cache(partial(execute.make_result_handler, committed=self.committed))
        return list(map(make_handler, self.out_avals, self.out_jax_shardings))

    @cached_property
    def is_compile_only(self) -> bool:
        """Return whether its devices are those of a topology, which run nothing."""
        return is_compile_only(self.plan.devices[0])

    def _must_run(self) -> None:
        if self.is_compile_only:
            raise compile_only_error(self.name, self.plan.devices[0])

    def keep(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Return leading arguments for every run, placed unless the devices only compile."""
        if not self.is_compile_only:
            return tuple(self.place(values))
        avals = self.in_avals
        return tuple(
            v if isinstance(v, jax.Array) else np.asarray(v, aval.dtype)
            for v, aval in zip(values, avals, strict=False)
        )

    def place(self, values: Sequence[Any], first: int = 0) -> list[Handle]:
        """Return handles of arguments, as the program requires them.

        Values with the required placement are unchanged.

        Args:
            values: The values.
            first: The position of the first one.
        """
        if not values:
            return []
        at = slice(first, first + len(values))
        self._check(values, self.in_shardings[at], self.plan.args[at])
        layouts = _required_layouts(values, self.in_layouts[at], self.full_layouts[0][at])
        return list(dispatch.place(values, self.in_jax_shardings[at], layouts))

    def place_as_results(self, values: Sequence[Any]) -> list[Handle]:
        """Return handles of values in the form of the program's leading results."""
        shardings = self.out_jax_shardings[: len(values)]
        self._check(values, self.out_shardings, self.plan.results)
        layouts = _required_layouts(values, self.out_layouts, self.full_layouts[1])
        return list(dispatch.place(values, shardings, layouts))

    def _check(
        self,
        values: Sequence[Any],
        shardings: Sequence[XLACompatibleSharding],
        plans: Sequence[ValuePlan],
    ) -> None:
        """Check that values for unreduced arguments or results have the same pending reductions.

        Raises:
            CompileOnlyError: The devices only compile.
            UnreducedError: A value has another one.
        """
        self._must_run()
        for sharding, plan, value in zip(shardings, plans, values, strict=False):
            if not sharding.is_unreduced:
                continue
            actual = getattr(value, "sharding", None)
            if actual is not None and sharding.is_equivalent_to(actual, value.ndim):
                continue
            name = plan.name or "an argument"
            raise UnreducedError(
                f"{self.name} takes {name} as partial results, by "
                f"{sharding}, and got a {type(value).__name__}: write device_put({name}, sharding)"
            )

    def admit(self, naming: "ValueNamer | None" = None, copies: "ProcessCopies" = tuple) -> None:
        """Return once all processes of the program have arrived at its first run.

        Args:
            naming: Returns the name of a closed-over value.
            copies: Returns the arguments of which every process passes its own copy.

        Raises:
            CompileOnlyError: Its devices only compile.
            ProgramsDifferError: A process has another program.
            UnequalError: An argument's copies differ between processes.
            ProcessesError: A process did not arrive.
        """
        self._must_run()
        if self.fingerprint is not None and CONSISTENCY.admit(self.fingerprint, naming, copies):
            self.fingerprint = None

    def runner(self, out: list[list[Handle]]) -> execute.Runner:
        """Return a function that runs on placed handles, one call at a time.

        It deletes the handles of donated arguments; the results may not be computed yet when
        it returns. Results that were appended survive an interrupt. `results` makes handles of
        them.

        Args:
            out: Receives the list of raw results of each run.
        """
        executable, handlers = self.executable, self.handlers
        plan, body = self.plan, self.body
        names = [v.name or "a result" for v in plan.results]
        checks = run_checks.RunChecks(self.name, names, plan.donated)
        if not body.has_effects:
            return execute.make_runner(executable, handlers, checks, self._may_take_over, out)

        effects = body.ordered_effects
        run_with_tokens = partial(execute.run_with_tokens, executable, handlers, effects)

        def run(handles: Sequence[Handle]) -> None:
            if run_checks.checks_runs():
                checks.run(run_with_tokens, handles, out)
            else:
                run_with_tokens(handles, out)

        return run

    def results(self, raw: list[Handle]) -> list[Handle]:
        """Return the handles of the results, without tokens and with key arrays wrapped."""
        tokens, avals = len(self.body.ordered_effects), self.out_avals
        if not self._has_keys:
            return raw[tokens:] if tokens else raw
        return list(map(execute.as_key_array, avals, raw[tokens:]))

    @property
    def is_spread(self) -> bool:
        """Return True if it runs on several devices."""
        return len(self.plan.devices) > 1

    def shared_pair(self, handles: Sequence[Handle]) -> tuple[int, int] | None:
        """Return the positions of two placed handles that share a donated buffer.

        Both positions are equal for a handle that lacks one of its buffers. Returns None without
        either.
        """
        if not self._may_take_over or shared_pair(handles, range(len(handles))) is None:
            return None
        # Donations that the compiler left unused are read from its text only here.
        return shared_pair(handles, self._taken_over)

    @cached_property
    def _may_take_over(self) -> bool:
        return any(self.plan.donated) or compiler.alias_bytes(self.executable) != 0

    @cached_property
    def _taken_over(self) -> frozenset[int]:
        """Return the positions of the arguments whose buffers the compiled program takes over."""
        tokens = len(self.body.ordered_effects)
        return frozenset(i - tokens for i in executables.aliases(self.executable).values())

    @cached_property
    def _has_keys(self) -> bool:
        return execute.has_keys(self.out_avals)

    def __call__(self, values: Sequence[Any]) -> list[Handle]:
        """Place values and run."""
        self.admit()
        out: list[list[Handle]] = []
        self.runner(out)(self.place(values))
        return self.results(out[0])


def _stacks(module: modules.Module) -> "Iterator[list[hlo.Frame]]":
    return ([hlo.Frame(*place) for place in stack] for stack in modules.source_locations(module))


def _jax_shardings(
    shardings: Sequence[XLACompatibleSharding], avals: Sequence[Any]
) -> tuple[Any, ...]:
    # Most values of a large program have few shardings and types.
    known: dict[Any, Any] = {}
    for sharding, aval in zip(shardings, avals, strict=True):
        if (id(sharding), aval) not in known:
            known[id(sharding), aval] = sharding.jax_sharding(getattr(aval, "shape", ()))
    return tuple([known[id(s), aval] for s, aval in zip(shardings, avals, strict=True)])


def _required_layouts(
    values: Sequence[Any], layouts: Sequence[Any], full: Sequence[Any]
) -> list[Any]:
    """Return the layout required of each value; None for a default layout that it has already."""
    return [
        whole if layout is None and compiler.custom_layout(value) is not None else layout
        for value, layout, whole in zip(values, layouts, full, strict=False)
    ]
