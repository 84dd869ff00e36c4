"""Lower programs of several processes in each by itself: print what plain JAX lowers, and we."""

import json

import jax

from tests._jax.trace.program_kinds import KINDS
from tests.core.processes import join_the_others
from xlashard._jax.trace.lower_for import lower_for
from xlashard.tpu import topology

NAMES = (
    *("automatic_axes", "devices_in_another_order", "donated_argument", "explicit_axes"),
    *("one_key", "shard_map_over_all_axes", "shardings_of_jit"),
)


def main() -> None:
    """Print the modules by kind, ours beside that of plain JAX, and the facts of a compiled one."""
    join_the_others()
    devices = topology("v5e-8").devices
    pairs = dict(zip(jax.devices(), devices, strict=True))
    modules = {}
    for name in NAMES:
        own, there = KINDS[name].make(jax.devices(), True), KINDS[name].make(devices, False)
        with own.make_context():
            lowered = lower_for(own.function.trace(*own.args), pairs)
        with there.make_context():
            plain = there.function.lower(*there.args)
        modules[name] = lowered.as_text(), plain.as_text()
        if name == "devices_in_another_order":
            texts = [stage.compile().as_text() for stage in (lowered, plain)]
    print(json.dumps({"modules": modules, "compiled": texts, "process": jax.process_index()}))


if __name__ == "__main__":
    main()
