"""Lower kinds whose kernels query the chip, in a process of its own; print what they left in JAX.

python -m tests._jax.trace.chip_process
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from tests._jax.trace.program_kinds import KINDS, Kind, Program, mesh_of
from xlashard._jax.trace.lower_for import lower_for
from xlashard._jax.trace.target_chip import assume_chip, trace_for_chip
from xlashard.tpu import topology


def main() -> None:
    """Print the facts of each kind as JSON."""
    devices = topology("v5e-8").devices
    double = jax.jit(lambda x: x * 2)
    double(np.ones(4))
    facts: dict[str, Any] = {"programs": [double._cache_size()]}
    plain = KINDS["automatic_axes"].make(jax.devices(), True)
    _, facts["note_of_another"] = trace_for_chip(lambda: trace(plain), devices[0])
    for name, kind in KINDS.items():
        if kind.queries_chip:
            facts[name] = describe_kind(kind, devices)
            facts["programs"].append(double._cache_size())
            double(np.ones(4))
            facts["programs"].append(double._cache_size())
    facts["others"] = compare_other_chips(devices)
    facts["own_chip"] = mesh_of(jax.devices()).abstract_mesh.abstract_device.platform
    with assume_chip(devices[0], in_kernels=True, all_threads=True):
        script = trace(KINDS["kernel_that_queries_the_chip"].make(jax.devices(), True))
    facts["script"] = str(script.jaxpr)
    print(json.dumps(facts))


def describe_kind(kind: Kind, devices: Sequence[Any]) -> dict[str, Any]:
    """Return what a kind is lowered to, and what the process's own traces are afterwards."""
    program, on_topology = kind.make(jax.devices(), True), kind.make(devices, False)
    traced, note = trace_for_chip(lambda: trace(program), devices[0])
    lowered = lower_for(traced, dict(zip(jax.devices(), devices, strict=True)))
    return {
        "plain": attempt(lambda: trace(on_topology).lower().as_text()),
        "module": lowered.as_text(),
        "note": note,
        "own": attempt(lambda: trace(program)),
        "own_wrapped": attempt(lambda: trace_wrapped(program)),
        "compiled": len(lowered.compile().as_text()),
    }


def trace(program: Program) -> jax.stages.Traced:
    """Trace a program."""
    return program.function.trace(*program.args)


def trace_wrapped(program: Program) -> jax.stages.Traced:
    """Trace a new function that calls a program."""
    return jax.jit(lambda *args: program.function(*args)).trace(*program.args)


def compare_other_chips(devices: Sequence[Any]) -> list[bool]:
    """Return whether the traces of one function for some chips equal that for the first."""
    program = KINDS["kernel_that_queries_the_chip"].make(jax.devices(), True)
    chips = devices[0], topology("v7x-8").devices[0], devices[0]
    texts = [str(trace_for_chip(lambda: trace(program), chip)[0].jaxpr) for chip in chips]
    return [text == texts[0] for text in texts]


def attempt(run: Callable[[], object]) -> str:
    """Return the text of a result, or of an error."""
    try:
        return str(run())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
