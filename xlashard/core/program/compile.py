"""Compilation of annotated modules."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from xlashard._jax import stablehlo_modules as modules
from xlashard._jax.lowering import LoweredBody
from xlashard._jax.runtime import compiler
from xlashard._jax.runtime.shardings import is_compile_only
from xlashard.core.program.donation import bytes_of, sum_known
from xlashard.core.program.executables import (
    EXECUTABLES,
    LoadedExecutable,
    PropagatedShardings,
    Source,
    resolve_shardings,
)
from xlashard.core.program.execute import CompiledProgram
from xlashard.core.program.lowered import LoweredProgram
from xlashard.core.program.plan import Partitioner, ProgramPlan
from xlashard.errors import (
    CompileError,
    ProcessesError,
    ProgramTooLargeError,
    UnsupportedOperationError,
)
from xlashard.support.formatting import in_bytes, near_line
from xlashard.support.lazily import deferred
from xlashard.support.tracebacks import is_users_file

if TYPE_CHECKING:
    from xlashard._jax.runtime import offline
    from xlashard.core.program import remote_compile
    from xlashard.core.program.consistency import fingerprint as fingerprints
    from xlashard.core.program.consistency.fingerprint import ProgramFingerprint
else:
    offline = deferred("xlashard._jax.runtime.offline")
    fingerprints = deferred("xlashard.core.program.consistency.fingerprint")
    remote_compile = deferred("xlashard.core.program.remote_compile")


def compile_program(
    lowered: LoweredProgram,
    options: Sequence[tuple[str, Any]] = (),
    *,
    committed: bool = True,
    share: bool = False,
) -> CompiledProgram:
    """Compile an annotated module and read the propagated shardings.

    Args:
        lowered: The annotated module.
        options: Options of the compiler, past those of the plan.
        committed: Whether the results are bound to their devices.
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
            plan, body.module, request, body.callbacks, lowered.closed
        )
    with compiler_errors(plan, request, body.module):
        loaded, source = _loaded(lowered, request, fingerprint if share else None)
    facts = {"request": request, "source": source, "fingerprint": fingerprint}
    return resolve_program(lowered, loaded, loaded, committed=committed, **facts)


def resolve_program(
    lowered: LoweredProgram,
    loaded: LoadedExecutable,
    chosen: PropagatedShardings,
    *,
    committed: bool = True,
    **facts: Any,
) -> CompiledProgram:
    """Return a program with the shardings that the partitioner chose.

    Args:
        lowered: The annotated module.
        loaded: The executable; an empty one for a program of which only the HLO is at hand.
        chosen: Reader of the propagated shardings.
        committed: Whether the results are bound to their devices.
        **facts: Request, source and fingerprint.
    """
    plan, body = lowered.plan, lowered.body
    args, results = resolve_shardings(chosen, plan, len(body.ordered_effects))
    return CompiledProgram(
        loaded=loaded,
        plan=plan,
        in_shardings=args,
        out_shardings=results,
        in_avals=lowered.in_avals,
        out_avals=lowered.out_avals,
        committed=committed,
        body=body,
        kept=lowered.kept,
        written=lowered.written,
        stateful=lowered.stateful,
        lowered=lowered,
        **facts,
    )


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
    with compiler_errors(plan, request, body.module):
        yield kind.of(body.module, request)


@contextmanager
def compiler_errors(
    plan: ProgramPlan, request: compiler.CompileRequest, module: Any
) -> Iterator[None]:
    """Raise the compiler's errors as this package's.

    Args:
        plan: Plan of the module.
        request: Request of the compilation.
        module: The module.
    """
    try:
        yield
    except ProcessesError:
        raise
    except RuntimeError as error:
        if compiler.ran_out_of_memory(error):
            text = _oom_text(plan, compiler.error_text(error))
            raise ProgramTooLargeError(text) from None
        _check_custom_calls(plan, request, module, compiler.error_text(error))
        raise CompileError(_refusal_text(plan.function_name, error, request.options)) from error


_UNKNOWN_CALL = re.compile(
    r"Custom emitter for (\S+) not found|No FFI handler registered for (\S+)"
    r"|No registered implementation for \S+ custom call to \"?([^\s\"]+)"
)
_SUSPECTED = re.compile(r"^\s+(\S[^\n]*?):(\d+):\d+ \[", re.MULTILINE)
_PYTHON_ERROR = re.compile(r"^\w[\w.]*(?:Error|Exception)\b.*", re.MULTILINE)
_PYTHON_PARTITIONING = "custom_partitioner: Traceback"
_PARTITIONED = "CustomSPMDPartitioning"
_OWN_PARTITIONING = (
    "custom_partitioning",
    "its partitioning is a Python function, which the compiler of a topology can't call; wrap it "
    "in jax.shard_map, or write an implementation without it, such as implementation='xla'",
)


def _check_custom_calls(
    plan: ProgramPlan, request: compiler.CompileRequest, module: Any, text: str
) -> None:
    """Raise if the compiler of a topology refused a custom call.

    Args:
        plan: Plan of the module.
        request: Request of the compilation.
        module: The module.
        text: The compiler's message.

    Raises:
        UnsupportedOperationError: With the operation and its line.
    """
    match = _UNKNOWN_CALL.search(text)
    is_partitioned = _PYTHON_PARTITIONING in text
    if not is_compile_only(request.devices[0]) or not (match or is_partitioned):
        return
    target = _PARTITIONED if match is None else next(filter(None, match.groups()))
    stack = [(place.file, place.line) for place in modules.find_call(module, target)]
    # A call in an inner function has its own line alone; XLA knows those of its callers.
    stack += [(file, int(line)) for file, line in _SUSPECTED.findall(text)]
    users = [line for line in stack if is_users_file(line[0])]
    source = near_line(*(users or stack)[0]) if stack else ""
    operation, why = _OWN_PARTITIONING
    if target != _PARTITIONED:
        operation = target
        why = (
            "its handler is code of a process with such devices; leave it out here by "
            "jax.lax.platform_dependent, or write the operation in JAX"
        )
    elif is_partitioned:
        errors = _PYTHON_ERROR.findall(text)
        why = f"{errors[-1]}; {why}" if errors else why
    raise UnsupportedOperationError(  # no-catalogue: an error of XLA
        f"XLA can't compile {plan.function_name} for {request.devices[0].device_kind}: {operation} "
        f"at {source or 'an unknown line'}: {why}",
        operation=operation,
        source=source,
    )


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
    known = sum_known(list(map(bytes_of, plan.args)))
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
