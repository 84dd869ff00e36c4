"""The pairs in the processes of a pod, which `test_guide` starts."""

import jax
import numpy as np

from tests.core.processes import join_the_others
from tests.legacy.guide import kinds, pairs
from xlashard.legacy import installer as installing


def main() -> None:
    join_the_others()
    # The environment has JAX_ARRAY=0.
    installing.install()
    assert jax.config.jax_array is False
    jax.config.update("jax_array", True)
    from jax.experimental.maps import Mesh

    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    for pair in pairs.PAIRS:
        pairs.run_both_ways(pair, mesh, pairs.XLASHARD)
        print("same:", pair.name, flush=True)
    kinds.check_kinds(mesh)
    kinds.check_host_local_error(mesh)
    kinds.check_switching(mesh)
    print("all pairs are the same")


if __name__ == "__main__":
    main()
