"""Run features of xlashard in a process on a JAX that lacks some private names.

python -m tests.private_names.features '{"hidden": ["jax._src.core.Var"], "features": ["pjit"]}'

It prints a JSON object with the outcome of each feature.
"""

import contextlib
import importlib
import io
import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.private_names.hiding import hide_names

FEATURES: dict[str, Callable[[], object]] = {}


def _feature(run: Callable[[], object]) -> Callable[[], object]:
    FEATURES[run.__name__] = run
    return run


def _mesh(count: int = 2) -> Any:
    return jax.sharding.Mesh(np.array(jax.devices()[:count]), ("data",))


def _array() -> Any:
    import xlashard

    rows = xlashard.NamedSharding(_mesh(), xlashard.P("data"))
    return xlashard.device_put(np.ones((4, 2), np.float32), rows)


@_feature
def imports() -> object:
    import xlashard

    return xlashard.hlo, xlashard.geometry


@_feature
def command_line() -> object:
    from xlashard.cli.main import main as cli

    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        cli(["--help"])
    return None


@_feature
def geometry() -> object:
    from xlashard.geometry import MeshGrid

    return MeshGrid(("data", "model"), (2, 4))


@_feature
def hlo_read() -> object:
    import xlashard

    return xlashard.hlo.read(
        "HloModule m\n\nENTRY main {\n  p = f32[4] parameter(0)\n  ROOT r = f32[4] negate(p)\n}\n"
    )


@_feature
def device_put() -> object:
    return np.asarray(_array())


@_feature
def operator() -> object:
    return np.asarray(_array() + 1)


@_feature
def pjit() -> object:
    import xlashard

    double = xlashard.pjit(lambda x: x * 2)
    x = _array()
    return np.asarray(double(double(x)))


@_feature
def grad_of_pjit() -> object:
    import xlashard

    loss = xlashard.pjit(lambda x: jnp.sum(x * x))
    return np.asarray(jax.grad(loss)(_array()))


@_feature
def reshard() -> object:
    import xlashard

    whole = xlashard.NamedSharding(_mesh(), xlashard.P())
    return np.asarray(xlashard.reshard(_array(), whole))


@_feature
def explain_jit() -> object:
    import xlashard

    return xlashard.explain(jax.jit(lambda x: x @ x.T), np.ones((4, 8), np.float32)).to_json()


@_feature
def explain_recompile() -> object:
    import xlashard

    double = xlashard.pjit(lambda x: x * 2)
    double(np.ones(4, np.float32)), double(np.ones(5, np.float32))
    return str(xlashard.explain_recompile(double))


@_feature
def visualize() -> object:
    import xlashard

    with contextlib.redirect_stdout(io.StringIO()):
        return xlashard.visualize(_array())


@_feature
def preflight_jit() -> object:
    import xlashard

    x = jax.ShapeDtypeStruct((1024, 512), "bfloat16")
    return xlashard.preflight(
        jax.jit(lambda x: x @ x.T), x, topology="v5e-4", mesh={"data": 4}
    ).outcome


@_feature
def auto_shard() -> object:
    import xlashard

    w, x = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((256, 64), (1024, 256)))
    return xlashard.auto_shard(lambda w, x: x @ w, w, x, mesh={"data": 2}).to_json()


@_feature
def legacy() -> object:
    importlib.import_module("xlashard.legacy.install")
    return importlib.import_module("jax.experimental.maps").Mesh


def run_feature(name: str) -> dict[str, Any]:
    """Run a feature and return its error: class, text and attributes; empty without one."""
    try:
        FEATURES[name]()
    except Exception as error:
        facts = {key: value for key, value in vars(error).items() if isinstance(value, str)}
        return {**facts, "error": type(error).__name__, "text": str(error)}
    return {}


def main(words: list[str]) -> int:
    """Run the features of a request."""
    request = json.loads(words[0])
    reads: set[str] | None = set() if request.get("record") else None
    hide_names(request.get("hidden", ()), request.get("version"), reads)
    outcomes: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name in request["features"]:
            outcomes[name] = run_feature(name)
    versions = [str(w.message) for w in caught if type(w.message).__name__ == "JaxVersionWarning"]
    print(json.dumps({"features": outcomes, "warnings": versions, "reads": sorted(reads or ())}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
