"""Lower and compile kinds of programs for the devices of a topology, by public calls of JAX only.

python -m tests._jax.trace.plain_lowering REQUEST ANSWER, both files of JSON
"""

import json
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from tests._jax.trace.program_kinds import KINDS


def main(request: Path, answer: Path) -> None:
    """Write the module, or the error, of each requested kind."""
    # Read when libtpu and the CUDA plugin are loaded: no chip is looked for.
    os.environ.update(
        TPU_SKIP_MDS_QUERY="1",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        TPU_ACCELERATOR_TYPE="v5p-8",
        TPU_WORKER_HOSTNAMES="localhost",
        TPU_STDERR_LOG_LEVEL="3",
        TPU_MIN_LOG_LEVEL="3",
        TPU_LOG_DIR="disabled",
        TF_CPP_MIN_LOG_LEVEL="3",
        JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1",
    )
    warnings.simplefilter("ignore")
    wanted = json.loads(request.read_text("utf-8"))
    devices = list(topologies.get_topology_desc(**wanted["topology"]).devices)
    found = {name: lower(name, devices, wanted["compiled"]) for name in wanted["kinds"]}
    assert "xlashard" not in sys.modules
    answer.write_text(json.dumps(found), "utf-8")


def lower(name: str, devices: list[Any], compiled: list[str]) -> dict[str, Any]:
    """Return the module of a kind, and the facts of its compiled program if they are wanted."""
    try:
        program = KINDS[name].make(devices, False)
        with program.make_context():
            lowered = program.function.lower(*program.args)
        facts = describe(lowered.compile()) if name in compiled else {}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"module": lowered.as_text(), **facts}


def describe(compiled: Any) -> dict[str, Any]:
    """Return what is compared of a compiled program."""
    memory = compiled.memory_analysis()
    sizes = [name for name in dir(memory) if name.endswith("_in_bytes")]
    return {
        "hlo": without_sources(compiled.as_text()),
        "memory": {name: getattr(memory, name) for name in sizes},
        "cost": compiled.cost_analysis(),
        "shardings": describe_shardings(compiled),
    }


def describe_shardings(compiled: Any) -> list[str] | None:
    """Return the shardings of arguments and results; None of a program with references."""
    try:
        shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    except ValueError:
        # JAX counts closed-over references as arguments, which the tree has not.
        return None
    return [f"{sharding} {describe_devices(sharding)}" for sharding in shardings]


def describe_devices(sharding: Any) -> list[int]:
    """Return the numbers of a sharding's devices, in order where the sharding has one."""
    if isinstance(sharding, jax.sharding.NamedSharding):
        return [device.id for device in sharding.mesh.devices.flat]
    return sorted(device.id for device in sharding.device_set)


def without_sources(text: str) -> str:
    """Return HLO without the names of source files and functions."""
    text = re.sub(r', metadata=\{(?:[^{}"]|"(?:[^"\\]|\\.)*"|\{[^{}]*\})*\}', "", text)
    tables = r"(?m)^(FileNames|FunctionNames|FileLocations|StackFrames)\n(?:\d+ .*\n)*"
    return re.sub(r"\n+", "\n", re.sub(tables, "", text))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
