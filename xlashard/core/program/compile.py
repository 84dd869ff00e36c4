"""Compilation of annotated modules."""

import re
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xlashard._jax import stablehlo_modules as modules
from xlashard._jax.lowering import LoweredBody
from xlashard._jax.runtime import compiler, executables
from xlashard._jax.runtime.shardings import is_compile_only, layout_text
from xlashard.core.program.annotate import write_main
from xlashard.core.program.donation import (
    Donation,
    UnusedDonation,
    bytes_of,
    local_bytes,
    refusal,
    report_text,
)
from xlashard.core.program.executables import (
    EXECUTABLES,
    LoadedExecutable,
    Source,
    resolve_shardings,
)
from xlashard.core.program.execute import LoadedProgram, ProgramParts
from xlashard.core.program.plan import Partitioner, ProgramPlan, ValuePlan
from xlashard.errors import (
    CompileError,
    DonationError,
    DonationWarning,
    ProcessesError,
    ProgramTooLargeError,
)
from xlashard.support.formatting import in_bytes
from xlashard.support.lazily import dataclass, deferred

if TYPE_CHECKING:
    from xlashard._jax.runtime import offline
    from xlashard.core.program import remote_compile
    from xlashard.core.program.consistency import fingerprint as fingerprints
    from xlashard.core.program.consistency.fingerprint import ClosedOver, ProgramFingerprint
else:
    offline = deferred("xlashard._jax.runtime.offline")
    fingerprints = deferred("xlashard.core.program.consistency.fingerprint")
    remote_compile = deferred("xlashard.core.program.remote_compile")

_NO_USE = "the function makes no use of it, so its buffers stay as they are"
# A warning names the line of the caller of this package.
_OWN_FILES = str(Path(__file__).parents[2])


@dataclass(frozen=True, eq=False)
class LoweredProgram:
    """An annotated module, ready for the compiler.

    Attributes:
        plan: Its plan.
        body: The module, and objects that it keeps alive.
        donation: Plan for the donated arguments.
        source: Source location of its function. Programs of one function with equal modules share
            an executable; None for a program that shares none.
        unused: Donated arguments that the function does not use, and that the program lacks.
    """

    plan: ProgramPlan
    body: LoweredBody
    donation: Donation
    source: str | None = None
    unused: tuple[ValuePlan, ...] = ()
    _reported: set[str] = field(default_factory=set, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def as_text(self, *, debug_info: bool = False) -> str:
        """Return the StableHLO module with its annotations."""
        return modules.to_text(self.body.module, debug_info=debug_info)

    def report_donation(
        self, mode: str, function: str, program: LoadedProgram | None = None
    ) -> None:
        """Warn about donated arguments that no result can reuse; once per program.

        Args:
            mode: `"warn"` or `"strict"`.
            function: The function's name.
            program: The compiled program, to report donations that the compiler left unused; None
                to report those that it can't use.

        Raises:
            DonationError: Under `"strict"`, every time.
        """
        refusals = []
        if any(self.plan.donated) or self.unused:
            refusals = self._refused() if program is None else self._left(program)
        if not refusals:
            return
        text = report_text(refusals, function)
        if mode == "strict":
            raise DonationError(text)
        with self._lock:
            if text in self._reported:
                return
            self._reported.add(text)
        warnings.warn(text, DonationWarning, skip_file_prefixes=(_OWN_FILES,))

    def refusals(self, program: LoadedProgram) -> dict[str, UnusedDonation]:
        """Return the reasons why donated arguments keep their buffers, by path.

        Args:
            program: The compiled program.
        """
        refusals = [*self._refused(), *self._left(program)]
        return {refused.value.name: refused for refused in refusals}

    def refusals_by(
        self, parts: ProgramParts, aliases: Mapping[int, int]
    ) -> dict[str, UnusedDonation]:
        """Return the reasons why donated arguments keep their buffers, from the program's parts.

        Args:
            parts: Its parts.
            aliases: The argument whose buffers each result takes over, with tokens counted.
        """
        layouts = [v.layout for v in parts.plan.args], [v.layout for v in parts.plan.results]
        refusals = [*self._refused(), *self._unused_donations(parts, layouts, aliases)]
        return {refused.value.name: refused for refused in refusals}

    def _refused(self) -> list[UnusedDonation]:
        """Return the refusals that are known before compilation."""
        takers = dict.fromkeys(self.plan.aliased) | {j: i for i, j in self.donation.pairs.items()}
        refusals = [refusal(self.plan, i, takers) for i in self.donation.unusable]
        return refusals + [UnusedDonation(value, _NO_USE) for value in self.unused]

    def _left(self, program: LoadedProgram) -> list[UnusedDonation]:
        """Return the refusals of donated arguments that the compiler left unused."""
        if len(self.donation.certain) == len(self.donation.pairs):
            return []
        args, shardings = self.plan.args, program.parts.in_shardings
        offered = _sum_known([local_bytes(args[i], shardings[i]) for i in self.donation.pairs])
        if compiler.alias_bytes(program.executable) in (None, offered):
            return []
        parts = program.parts
        ins = map(layout_text, program.in_layouts, [aval.dtype for aval in parts.in_avals])
        outs = map(layout_text, program.out_layouts, [aval.dtype for aval in parts.out_avals])
        aliases = executables.aliases(program.executable)
        return self._unused_donations(parts, (list(ins), list(outs)), aliases)

    def _unused_donations(
        self, parts: ProgramParts, layouts: "_Layouts", aliases: Mapping[int, int]
    ) -> list[UnusedDonation]:
        plan, tokens = _with_chosen_shardings(parts, layouts), len(self.body.ordered_effects)
        aliased = {result - tokens: argument - tokens for result, argument in aliases.items()}
        left = self.donation.pairs.keys() - aliased.values()
        return [refusal(plan, i, dict(aliased)) for i in sorted(left)]


def _sum_known(sizes: Sequence[object]) -> int:
    """Return the sum of the bytes of values, keys left out."""
    return sum([size for size in sizes if isinstance(size, int)])


type _Layouts = tuple[Sequence[str | None], Sequence[str | None]]
"""Layouts of arguments and of results."""


def _with_chosen_shardings(parts: ProgramParts, layouts: _Layouts) -> ProgramPlan:
    """Return the plan of a program with the compiler's choices."""

    def with_choices(values: Any, shardings: Any, layouts: Any) -> tuple[ValuePlan, ...]:
        return tuple(
            replace(value, sharding=sharding, annotated=False, layout=layout)
            for value, sharding, layout in zip(values, shardings, layouts, strict=True)
        )

    return replace(
        parts.plan,
        args=with_choices(parts.plan.args, parts.in_shardings, layouts[0]),
        results=with_choices(parts.plan.results, parts.out_shardings, layouts[1]),
    )


def lower_program(
    plan: ProgramPlan,
    body: LoweredBody,
    source: str | None = None,
    unused: Sequence[ValuePlan] = (),
) -> LoweredProgram:
    """Annotate a lowered body; the body's module becomes the program's.

    Args:
        plan: The plan.
        body: The lowered body.
        source: Source location of its function, to share the executable with programs of the same
            function.
        unused: Donated arguments that the function does not use.

    Raises:
        ModuleError: If the module has no entry function, or does not verify.
        PlanError: If the plan and the entry function disagree.
    """
    tokens = len(body.ordered_effects)
    plan = _with_whole_results(plan, body.module, tokens)
    donation = write_main(body.module, plan, tokens=tokens)
    return LoweredProgram(plan, body, donation, source, tuple(unused))


def _with_whole_results(plan: ProgramPlan, module: Any, tokens: int) -> ProgramPlan:
    """Return the plan with results replicated that only one of several devices would hold."""
    main = modules.main_function(module)
    if main is None or len(plan.devices) == 1:
        return plan
    of_one = modules.single_device_results(main)[tokens:]
    if not any(of_one) or len(of_one) != len(plan.results):
        return plan
    results = [
        replace(value, sharding=plan.replicated(value.memory_kind))
        if one and value.sharding is None and not value.annotated
        else value
        for one, value in zip(of_one, plan.results, strict=True)
    ]
    return replace(plan, results=tuple(results))


def compile_program(
    lowered: LoweredProgram,
    avals: tuple[Sequence[Any], Sequence[Any]],
    *,
    committed: bool,
    options: Sequence[tuple[str, Any]] = (),
    closed: "ClosedOver | None" = None,
    share: bool = False,
) -> LoadedProgram:
    """Compile an annotated module and read the propagated shardings.

    Args:
        lowered: The annotated module.
        avals: The abstract values of arguments and results.
        committed: Whether the results are bound to their devices.
        options: Options of the compiler, past those of the plan.
        closed: Its closed-over values.
        share: Compile in one process, and load its executable in the others.

    Raises:
        CompileError: XLA rejects the module or an option.
        ProgramTooLargeError: It needs more memory than a device has.
        ProcessesError: It is shared, and a process does not arrive, or has another program.
    """
    plan, body = lowered.plan, lowered.body
    request = compile_request(plan, body, options)
    fingerprint = None
    if not plan.is_of_one_process:
        fingerprint = fingerprints.ProgramFingerprint(
            plan, body.module, request, body.callbacks, closed
        )
    with compiler_errors(plan, request):
        loaded, source = _loaded(lowered, request, fingerprint if share else None)
    args, results = resolve_shardings(loaded, plan, len(body.ordered_effects))
    parts = ProgramParts(
        plan=plan,
        in_shardings=args,
        out_shardings=results,
        in_avals=tuple(avals[0]),
        out_avals=tuple(avals[1]),
        committed=committed,
        body=body,
        request=request,
    )
    return LoadedProgram(loaded, parts, source, fingerprint)


@contextmanager
def compiler_input(
    plan: ProgramPlan, body: LoweredBody, options: Sequence[tuple[str, Any]] = ()
) -> "Iterator[offline.PhaseInput | offline.CompileInput]":
    """Yield the input of a compilation that leaves dumps; raise its errors as this package's.

    For TPUs it is that of the first phase, which partitions and schedules the module and assigns
    its buffers, and makes no code. The compiler for GPUs has no such phase.

    Args:
        plan: Plan of the module, for the devices of a topology.
        body: The annotated module.
        options: Options of the compiler, past those of the plan, with the folder of its dumps.

    Raises:
        CompileError: XLA rejects the module or an option.
        ProgramTooLargeError: It needs more memory than a device has.
        TopologyError: The installed libtpu can't compile without generating code.
    """
    request = compile_request(plan, body, options)
    kind = offline.input_kind(request.devices[0])
    with compiler_errors(plan, request):
        yield kind.of(body.module, request)


@contextmanager
def compiler_errors(plan: ProgramPlan, request: compiler.CompileRequest) -> Iterator[None]:
    """Raise the compiler's errors as this package's."""
    try:
        yield
    except ProcessesError:
        raise
    except RuntimeError as error:
        if compiler.ran_out_of_memory(error):
            text = _oom_text(plan, compiler.error_text(error))
            raise ProgramTooLargeError(text) from None
        raise CompileError(_refusal_text(plan.function_name, error, request.options)) from error


def _loaded(
    lowered: LoweredProgram, request: compiler.CompileRequest, shared: "ProgramFingerprint | None"
) -> tuple[LoadedExecutable, Source]:
    module = lowered.body.module
    in_worker = remote_compile.compile_module if is_compile_only(request.devices[0]) else None
    loaded = LoadedExecutable()
    if shared is not None:
        compile_here = partial(loaded.compile, module, request, in_worker)
        return loaded, remote_compile.compile_shared(shared, lowered.body, loaded, compile_here)
    # A module refers to Python objects by number only. Processes that compile one program together
    # must all compile it, even if one of them has the executable.
    is_defined_by_text = lowered.body.is_self_contained and lowered.plan.is_of_one_process
    if lowered.source is not None and is_defined_by_text:
        key = (lowered.source, compiler.fingerprint(module, request))
        loaded = EXECUTABLES.slot(key)
    return loaded, loaded.compile(module, request, in_worker)


def _refusal_text(name: str, error: RuntimeError, options: Sequence[tuple[str, Any]]) -> str:
    text = compiler.error_text(error)
    named = [option for option, _ in options if option in text]
    hint = f"; remove {named[0]!r} from compiler_options" if named else ""
    return f"XLA can't compile {name}: {text}{hint}"


def compile_request(
    plan: ProgramPlan, body: LoweredBody, options: Sequence[tuple[str, Any]] = ()
) -> compiler.CompileRequest:
    """Return the request for the compilation of an annotated module.

    Args:
        plan: Plan of the module.
        body: The module.
        options: Options of the compiler, past those of the plan.
    """
    bound = (False,) * len(body.ordered_effects)
    multi = len(plan.devices) > 1
    return compiler.CompileRequest(
        devices=plan.devices,
        shardy=plan.partitioner is Partitioner.SHARDY,
        free_args=(*bound, *[multi and v.is_free for v in plan.args]),
        free_results=(*bound, *[multi and v.is_free for v in plan.results]),
        options=(*plan.options, *options),
        host_callbacks=body.host_callbacks,
    )


_SIZE = r"([\d.]+)([KMGT]?)B?"
_FIGURES = (
    rf"\bUsed {_SIZE} of {_SIZE} (?:hbm|HBM)",
    rf"\({_SIZE}\) exceeds available (?:hbm|HBM) \({_SIZE}\)",
)
_EXCESS = rf"\bExceeded (?:hbm|HBM) capacity by {_SIZE}"
_STATUS = r"^(?:[A-Z_]+:\s+)?(?:[A-Z]\d+:\s+)?(?:\w+:\s+)?"
"""Prefix of an error of XLA: its class, number and name."""


def _oom_text(plan: ProgramPlan, message: str) -> str:
    """Return the needed and available memory of a program, and suggestions.

    Args:
        plan: Plan of the program.
        message: The compiler's error. Its memory figures are used if it has any, else its first
            line.
    """
    name, device = plan.function_name, plan.devices[0]
    figures = next(filter(None, (re.search(form, message) for form in _FIGURES)), None)
    if figures is None:
        line = re.sub(_STATUS, "", message).partition("\n")[0].rstrip(" .-")
        return f"{name} needs more memory than a {device.device_kind} has: {line}"
    # Without the padding of layouts.
    known = _sum_known(list(map(bytes_of, plan.args)))
    part = f", {in_bytes(known)} of it for arguments" if known else ""
    needed, available = _text(*figures.groups()[:2]), _text(*figures.groups()[2:])
    excess = re.search(_EXCESS, message)
    more = f", {_text(*excess.groups())} more than fits" if excess is not None else ""
    return (
        f"{name} does not fit: it needs {needed} of the memory of each {device.device_kind}"
        f"{part}, and may use {available}{more}. Inspect it by "
        f"xlashard.preflight({name}, ..., topology=...); then shard arguments over more devices, "
        "donate those that results replace, or recompute in the backward pass with jax.checkpoint"
    )


def _text(number: str, unit: str) -> str:
    return f"{number} {unit}iB" if unit else f"{number} B"
