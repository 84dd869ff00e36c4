"""Assertions on the collectives, the reshards and the memory of a program, for user tests."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xlashard._jax.trace.jitted import inner_stage
from xlashard.analysis.explain.explain import explain
from xlashard.analysis.explain.model import CollectiveReport
from xlashard.analysis.explain.program_report import (
    ProgramReport,
    collectives_text,
    moves_text,
    values_text,
)
from xlashard.analysis.programs.program_reader import compile_program, read
from xlashard.analysis.programs.source_lines import SourceLocator
from xlashard.analysis.report.texts import line_text, operation_text
from xlashard.errors import ArgumentError, ExpectationError
from xlashard.hlo.collective_kinds import KINDS, RESHARDING_KINDS
from xlashard.hlo.module import Instruction
from xlashard.pods.testing.emulated_devices import check_whole
from xlashard.support.formatting import closest, in_bytes, parse_amount, typed
from xlashard.support.lazily import deferred
from xlashard.support.tracebacks import short_tracebacks

if TYPE_CHECKING:
    from xlashard.predict.preflight import preflight_run
else:
    # For programs of a topology.
    preflight_run = deferred("xlashard.predict.preflight.preflight_run")

_TOTAL = "total"
_OTHERS = "others"
_NAMES = {kind.replace("-", "_"): (kind,) for kind in KINDS} | {_TOTAL: KINDS, _OTHERS: KINDS}
_EXAMPLE = "assert_collectives(f, (x,), all_gather=2, all_reduce_bytes_at_most=2**20, others=0)"


def assert_collectives(
    f: Any,
    args: Sequence[Any] = (),
    /,
    *,
    along: str | None = None,
    **expected: int,
) -> None:
    """Fail unless a call's program has exactly the expected collectives.

    Nothing runs: the program is compiled, and cached for a call with equal arguments. Kinds that
    are not mentioned are allowed; `others=0` forbids them.

    Args:
        f: A function of `xlashard.pjit`, `jax.jit`, `nnx.jit` or `eqx.filter_jit`, a plain
            function, or a compiled stage.
        args: Its arguments; a `jax.ShapeDtypeStruct` can replace an array.
        along: Count only collectives along these mesh axes: `"model"`, `"data, model"`.
        **expected: Keyed by a kind (`all_gather`, `all_reduce`, `reduce_scatter`, `all_to_all`,
            `ragged_all_to_all`, `collective_permute`, `collective_broadcast`), `others` for all
            kinds that are not named, or `total`: the number of collectives in the program's text.
            With the suffix `_at_most`, the largest number. With `_bytes_at_most`, the largest
            number of bytes that a device sends by them in one execution, with loops multiplied by
            their trip counts.

    Raises:
        ExpectationError: The program has other collectives; with a table of its collectives and
            their source lines. It is an `AssertionError`.
        ArgumentError: No expectation was passed, or an unknown one.

    Example:
        >>> import jax, numpy as np
        >>> from xlashard import Mesh, NamedSharding, P, pjit
        >>> rows = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))
        >>> total = pjit(lambda x: x.sum(), in_shardings=rows)
        >>> assert_collectives(total, (np.ones((16, 4)),), all_reduce=1, others=0)
    """
    with short_tracebacks:
        limits = [_limit(name, value) for name, value in expected.items()]
        if not limits:
            raise ArgumentError(
                f"assert_collectives needs at least one expectation, such as\n  {_EXAMPLE}"
            )
        report = _report("assert_collectives", f, args)
        counted = [
            c for c in report.collectives if along in (None, c.along, ", ".join(c.axes or ()))
        ]
        named = {limit.name for limit in limits}
        problems = [text for limit in limits if (text := limit.problem(counted, named))]
        if problems:
            where = f" along {along}" if along else ""
            table = collectives_text(report.collectives) or "It has no collectives."
            lines = "\n".join(f"  {text}" for text in problems)
            raise ExpectationError(
                f"{report.name} does not have the collectives{where} that were expected:\n"
                f"{lines}\n\n{table}"
            )


@dataclass(frozen=True)
class _Limit:
    """One expectation.

    Attributes:
        word: Name of the keyword argument: `all_gather_at_most`.
        name: The kind in it.
        measure: The measured quantity: "", "_at_most" or "_bytes_at_most".
        value: The number.
    """

    word: str
    name: str
    measure: str
    value: int

    def problem(self, collectives: Sequence[CollectiveReport], named: set[str]) -> str:
        """Return the description of a violation, or ""."""
        kinds = _NAMES[self.name]
        if self.name == _OTHERS:
            kinds = tuple(kind for kind in KINDS if kind.replace("-", "_") not in named)
        counted = [c for c in collectives if c.kind in kinds]
        count, sent = sum(c.count for c in counted), sum(c.sent_bytes for c in counted)
        expectation = f"{self.word}={self.value}"
        if self.measure == "_bytes_at_most":
            if sent <= self.value:
                return ""
            return f"{expectation}: a device sends {sent:,} bytes ({in_bytes(sent)})"
        right = count <= self.value if self.measure else count == self.value
        return "" if right else f"{expectation}: the program has {count}"


def _limit(word: str, value: Any) -> _Limit:
    for measure in ("_bytes_at_most", "_at_most", ""):
        name = word.removesuffix(measure) if measure else word
        if word.endswith(measure) and name in _NAMES:
            break
    else:
        known = [name + end for name in _NAMES for end in ("", "_at_most", "_bytes_at_most")]
        close = closest(word, known)
        endings = "also with _at_most or _bytes_at_most after them"
        names = f"valid names are {', '.join(_NAMES)}, {endings}"
        advice = f"did you mean {close}?" if close else names
        raise ArgumentError(f"assert_collectives takes no {word!r}; {advice}")
    check_whole(word, value, 0, f"{word}=2")
    return _Limit(word, name, measure, value)


def assert_no_resharding(f: Any, args: Sequence[Any] = (), /, *, inside: bool = True) -> None:
    """Fail if a call reshards its arguments first, or its program reshards values inside.

    Nothing runs. A reshard moves data between devices: the arguments should already have the
    shardings of the program. Host values, which must be transferred in any case, do not count.
    Inside the program an all-to-all or a collective-permute reshards a value; gathers and
    reductions do not count, because they belong to the computation.

    Args:
        f: A function of `xlashard.pjit`, `jax.jit`, `nnx.jit` or `eqx.filter_jit`, a plain
            function, or a compiled stage, which has no arguments: then only the program is
            inspected.
        args: Its arguments.
        inside: Whether to inspect the program. Pass False for an intended halo exchange
            (`jnp.roll`).

    Raises:
        ExpectationError: A value is resharded; with its path or source line. It is an
            `AssertionError`.

    Example:
        >>> import jax, numpy as np
        >>> from xlashard import Mesh, NamedSharding, P, device_put, pjit
        >>> mesh = Mesh(np.array(jax.devices()), ("data",))
        >>> rows, columns = NamedSharding(mesh, P("data")), NamedSharding(mesh, P(None, "data"))
        >>> double = pjit(lambda x: x * 2, in_shardings=rows)
        >>> assert_no_resharding(double, (device_put(np.ones((8, 8)), rows),))
    """
    with short_tracebacks:
        report = _report("assert_no_resharding", f, args)
        moves = [move for move in report.moves if move.device_bytes_moved]
        reshards = [c for c in report.collectives if inside and c.kind in RESHARDING_KINDS]
        if not moves and not reshards:
            return
        parts = []
        if moves:
            names = ", ".join(move.path for move in moves[:4]) + ", ..." * (len(moves) > 4)
            parts.append(
                f"{report.name} reshards {names} before it runs: device_put them with its "
                "in_shardings, or omit their in_shardings"
            )
        if reshards:
            parts.append(
                f"{report.name} reshards values while it runs: use one spec on both sides of "
                "these lines, or pass inside=False if the reshard is intended"
            )
        tables = [moves_text(moves), collectives_text(reshards)]
        raise ExpectationError("\n\n".join([*parts, *filter(None, tables)]))


def assert_memory(
    f: Any,
    args: Sequence[Any] = (),
    /,
    *,
    at_most: int | str,
    topology: Any = None,
    mesh: Any = None,
) -> None:
    """Fail if a call's program needs more memory of a device.

    Nothing runs. The figure is the compiler's plan for one device: arguments, results that do not
    reuse donated buffers, and temporaries; with a topology, the peak that `xlashard.preflight`
    reports of an estimate.

    Args:
        f: A function of `xlashard.pjit`, `jax.jit`, `nnx.jit` or `eqx.filter_jit`, a plain
            function, or a compiled stage.
        args: Its arguments; a `jax.ShapeDtypeStruct` can replace an array.
        at_most: Bytes of one device, or text such as `"14 GiB"`.
        topology: Topology for which it is compiled, as for `xlashard.preflight`: `"v5e-16"`; None
            for the devices at hand.
        mesh: Mesh on the topology, likewise.

    Raises:
        ExpectationError: The program needs more; with its largest values. It is an
            `AssertionError`.
        ArgumentError: `at_most` is no number of bytes, or the compiler does not report memory.
        TopologyError: As `xlashard.preflight` raises.

    Example:
        >>> import numpy as np
        >>> assert_memory(lambda x: x + 1, (np.ones(256, np.float32),), at_most="2 KiB")
    """
    with short_tracebacks:
        most = _read_bytes(at_most)
        if topology is None and mesh is not None:
            raise ArgumentError(
                "mesh of assert_memory is that of a topology: write topology=..., or enter the "
                "mesh by jax.set_mesh(mesh)"
            )
        name = "assert_memory"
        if topology is None:
            report = _report(name, f, args)
            peak, parts = _peak_here(report)
        else:
            check_call(name, f, args)
            report = preflight_run.preflight(f, *args, topology=topology, mesh=mesh, estimate=True)
            memory = report.memory
            peak = memory.total_bytes
            parts = _parts_text(memory.argument_bytes, memory.result_bytes, memory.temporary_bytes)
        if peak <= most:
            return
        tables = [values_text("Arguments", report.inputs), values_text("Results", report.outputs)]
        raise ExpectationError(
            f"{report.name} takes {peak:,} bytes ({in_bytes(peak)}) of a device's memory, "
            f"{peak - most:,} more than {most:,} ({in_bytes(most)}): {parts}\n\n"
            + "\n\n".join(filter(None, tables))
        )


def _read_bytes(at_most: Any) -> int:
    if isinstance(at_most, str):
        amount = parse_amount(at_most, "bytes", plain=True)
        if amount is None:
            raise ArgumentError(
                f'at_most is {at_most!r}, which is no number of bytes: write "14 GiB" or 2**30'
            )
        return int(amount)
    check_whole("at_most", at_most, 0, 'assert_memory(f, (x,), at_most="14 GiB")')
    return at_most


def _peak_here(report: ProgramReport) -> tuple[int, str]:
    """Return the bytes that a program needs of a device at hand, and of what they are."""
    memory = report.memory
    if memory is None:
        raise ArgumentError(  # no-catalogue: no supported compiler does this
            f"the compiler for {report.place.platform} does not report the memory of "
            f"{report.name}; see where it was compiled: print(xlashard.explain(f, x).place)"
        )
    own_results = memory.result_bytes - memory.alias_bytes
    parts = _parts_text(memory.argument_bytes, own_results, memory.temporary_bytes)
    # The code isn't part of what a program computes with.
    return memory.total_bytes - memory.code_bytes, parts


def _parts_text(arguments: int, results: int, temporaries: int) -> str:
    return (
        f"{in_bytes(arguments)} arguments, {in_bytes(results)} results that take over no "
        f"argument's buffers, {in_bytes(temporaries)} while it runs"
    )


def assert_no_host_transfer(f: Any, args: Sequence[Any] = (), /) -> None:
    """Fail if a call uploads an argument, or its program exchanges data with the host.

    Nothing runs. Arguments of NumPy and numbers of Python are uploaded by each call. Inside of the
    program, callbacks (`jax.pure_callback`, `io_callback`, `jax.debug.print`), infeeds, outfeeds
    and values in the host's memory (`jax.memory.Space.Host`, offloaded activations) cross the link
    to the host. CPU devices have no such link, so that on them only callbacks and arguments count.

    Args:
        f: A function of `xlashard.pjit`, `jax.jit`, `nnx.jit` or `eqx.filter_jit`, a plain
            function, or a compiled stage, which has no arguments: then only the program is
            inspected.
        args: Its arguments; a `jax.ShapeDtypeStruct` can replace an array.

    Raises:
        ExpectationError: Something is transferred; with paths and source lines. It is an
            `AssertionError`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> assert_no_host_transfer(jax.jit(lambda x: x * 2), (jnp.ones(4),))
    """
    with short_tracebacks:
        check_call("assert_no_host_transfer", f, args)
        program = compile_program(read(f, tuple(args), {}, "assert_no_host_transfer"))
        uploads = [
            f"  {value.path} ({typed(str(value.aval.dtype), value.aval.shape)}) is uploaded by "
            "each call: device_put it once, before the calls"
            for value in program.arguments
            if value.origin == "host" and value.sharding is not None
        ]
        inside = [
            f"  {_transfer_text(transfer, program.sources)}"
            for module in program.modules
            for transfer in module.host_transfers
        ]
        if uploads or inside:
            lines = "\n".join(dict.fromkeys([*uploads, *inside]))
            raise ExpectationError(f"{program.name} transfers data from or to the host:\n{lines}")


def _transfer_text(transfer: Instruction, sources: SourceLocator) -> str:
    operation = operation_text(transfer.op_name) if transfer.op_name else transfer.opcode
    line = sources.line(transfer.frames)
    return f"{operation} inside" if line is None else f"{operation} at {line_text(line)}"


def check_call(name: str, f: Any, args: Any) -> None:
    """Refuse what is no function or stage, and arguments that are no tuple, of an assertion.

    Args:
        name: Name of the assertion.
        f: Its first argument.
        args: Its second argument.

    Raises:
        ArgumentError: With the call to write.
    """
    if not isinstance(args, tuple | list):
        raise ArgumentError(
            f"{name} takes the arguments of the call as a tuple, not {type(args).__name__}: "
            f"{name}(f, (x,), ...)"
        )
    if not callable(f) and inner_stage(f) is None:
        raise ArgumentError(
            f"{name} takes a function or one of its stages, not {type(f).__name__}: write "
            f"{name}(f, (x,), ...)"
        )


def _report(name: str, f: Any, args: Any) -> ProgramReport:
    check_call(name, f, args)
    return explain(f, *args)
