"""Reports of functions of `jax.jit` load no module of the private ring, and read few private names.

`public_ring.py` makes the reports, in a process that refuses the ring.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.device_counts import emulate_devices
from tests.fork_server import python_command

pytestmark = pytest.mark.jax_version

ROOT = Path(__file__).resolve().parents[3]

READERS = {
    # Import: what is registered with JAX.
    "registration._hide_folder": "frames of this package are no place of an equation",
    "registration._name_on_meshes": "a result of jax.jit can have a sharding of this package",
    "runtime.global_state.clear_caches_with_jax": "jax.clear_caches clears those of this package",
    "runtime.global_state.dispatch_flag": "a thread's own flags are part of jax.jit's cache key",
    "runtime.tracebacks.hide_frames": "tracebacks of users hold no frame of this package",
    # Traces: no public function reads these of a jaxpr.
    "runtime.global_state.cached_by_jaxpr": "what is found in a jaxpr lives as long as it",
    "trace.jaxprs.array_literals": "closed-over arrays that are constants of the program",
    "trace.jaxprs.is_host_array": "closed-over arrays of NumPy",
    "trace.jaxprs.is_reference": "arguments of `jax.new_ref`",
    "trace.jitted._recorded": "the trace inside a function of nnx.jit or eqx.filter_jit",
    "trace.origins.source_line": "the user's line of an equation",
    "trace.tracing._jaxpr_types": "jaxprs among the parameters of an equation",
    "trace.tracing.named_shardings": "devices that the program names inside",
    "trace.tracing.is_token": "tokens among the results",
    "trace.tracing.physical_aval": "bytes of PRNG keys",
    "stablehlo_modules._call_target": "calls that hold addresses of this process",
    # Shardings: JAX has classes for them that are not public.
    "runtime.shardings.<lambda>": "no requested sharding, and one of the partitioner",
    "runtime.shardings.device_list": "the devices of a sharding of the partitioner",
    "runtime.shardings.hlo_text": "the tiles of a sharding of the partitioner",
    "runtime.shardings.op_sharding_text": "the same of the newer syntax",
    "runtime.shardings.tile_texts": "the same of a text",
    # Topologies: lowering and compilation for devices that are not there.
    "runtime.compiler.assigned": "options of a compilation for a topology",
    "runtime.compiler.compile_options": "the same, of one request",
    "runtime.compiler.platform_of": "the platform whose rules lower a program",
    "runtime.shardings.is_compile_only": "devices of a topology",
    "runtime.topologies._libtpu_environment": "libtpu is loaded without a TPU",
    "runtime.topologies.can_serialize": "the topology of a worker process",
    "runtime.topologies.compile_only_devices": "devices of a topology that has a name",
    "runtime.topologies.serialized_slice": "the topology of a worker process",
    "runtime.tracebacks._find_attempt": "the user's line of an operation that has no lowering",
    "trace.target_chip._replace_checks": "attention of cuDNN asks the GPU that isn't there",
    "trace.lower_for._answering": "JAX asks for the devices of a program",
    "trace.lower_for._parameters_of_one_call": "lowering for the devices of a topology",
    "trace.lower_for._with_arguments": "arguments of a program that JAX passes as a tuple",
    "runtime.transfer.<lambda>": "arrays of JAX, which can stand in for others in a script",
    "trace.lower_for.move_sharding": "a sharding of the partitioner among those of a program",
    "runtime.tracebacks.with_errors_as": "operands in errors of JAX about explicit mesh axes",
    "runtime.tracebacks._remove_hidden_frames": "errors of assertions end at the user's line",
}
"""The functions of `xlashard._jax` that these reports may need, and what each is for."""


def test_reports_of_jitted_functions_need_no_private_ring() -> None:
    environment = {
        **os.environ,
        **emulate_devices(8),
    }
    command = [*python_command(environment), "-m", "tests.analysis.programs.public_ring"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])

    assert facts["expected"]
    assert all(counts == facts["expected"] for counts in facts["collectives"].values())
    assert facts["preflights"] == {"shapes": True, "Traced": True, "Lowered": True}
    assert facts["sweep"] == ["fits"]
    assert facts["errors"] == {"function": "ExpectationError", "stage": "ExpectationError"}
    assert facts["nnx"] in (None, ["model.bias.value", "model.kernel.value", "x"])
    readers = facts["readers"]
    assert not readers.keys() - READERS.keys(), {r: readers[r] for r in readers if r not in READERS}
