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
PURE, PUBLIC, PRIVATE = "pure", "public", "private"
RINGS: dict[str, str] = {}
"""The ring of each feature: what it needs of JAX (docs/how/architecture.md)."""


def _feature(ring: str) -> Callable[[Callable[[], object]], Callable[[], object]]:
    def register(run: Callable[[], object]) -> Callable[[], object]:
        FEATURES[run.__name__], RINGS[run.__name__] = run, ring
        return run

    return register


def _mesh(count: int = 2) -> Any:
    return jax.sharding.Mesh(np.array(jax.devices()[:count]), ("data",))


def _array() -> Any:
    import xlashard

    rows = xlashard.NamedSharding(_mesh(), xlashard.P("data"))
    return xlashard.device_put(np.ones((4, 2), np.float32), rows)


@_feature(PURE)
def imports() -> object:
    import xlashard

    return xlashard.hlo, xlashard.geometry


@_feature(PURE)
def command_line() -> object:
    from xlashard.cli.main import main as cli

    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        cli(["--help"])
    return None


@_feature(PURE)
def geometry() -> object:
    from xlashard.geometry import MeshGrid

    return MeshGrid(("data", "model"), (2, 4))


@_feature(PURE)
def hlo_read() -> object:
    import xlashard

    return xlashard.hlo.read(
        "HloModule m\n\nENTRY main {\n  p = f32[4] parameter(0)\n  ROOT r = f32[4] negate(p)\n}\n"
    )


@_feature(PRIVATE)
def device_put() -> object:
    return np.asarray(_array())


@_feature(PRIVATE)
def operator() -> object:
    return np.asarray(_array() + 1)


@_feature(PRIVATE)
def pjit() -> object:
    import xlashard

    double = xlashard.pjit(lambda x: x * 2)
    x = _array()
    return np.asarray(double(double(x)))


@_feature(PRIVATE)
def grad_of_pjit() -> object:
    import xlashard

    loss = xlashard.pjit(lambda x: jnp.sum(x * x))
    return np.asarray(jax.grad(loss)(_array()))


@_feature(PRIVATE)
def reshard() -> object:
    import xlashard

    whole = xlashard.NamedSharding(_mesh(), xlashard.P())
    return np.asarray(xlashard.reshard(_array(), whole))


@_feature(PUBLIC)
def explain_jit() -> object:
    import xlashard

    return xlashard.explain(jax.jit(lambda x: x @ x.T), np.ones((4, 8), np.float32)).to_json()


@_feature(PUBLIC)
def explain_recompile() -> object:
    import xlashard

    double = xlashard.pjit(lambda x: x * 2)
    double(np.ones(4, np.float32)), double(np.ones(5, np.float32))
    return str(xlashard.explain_recompile(double))


@_feature(PUBLIC)
def visualize() -> object:
    import xlashard

    with contextlib.redirect_stdout(io.StringIO()):
        return xlashard.visualize(_array())


@_feature(PUBLIC)
def preflight_jit() -> object:
    import xlashard

    x = jax.ShapeDtypeStruct((1024, 512), "bfloat16")
    return xlashard.preflight(
        jax.jit(lambda x: x @ x.T), x, topology="v5e-4", mesh={"data": 4}
    ).outcome


@_feature(PRIVATE)
def auto_shard() -> object:
    import xlashard

    w, x = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((256, 64), (1024, 256)))
    return xlashard.auto_shard(lambda w, x: x @ w, w, x, mesh={"data": 2}).to_json()


@_feature(PUBLIC)
def explain_command() -> object:
    return _run_command("explain", "tests.private_names.features:example")


def example() -> tuple[Any, tuple[Any, ...]]:
    """Return a function of `jax.jit` and its arguments."""
    return jax.jit(lambda x: x @ x.T), (np.ones((4, 8), np.float32),)


@_feature(PUBLIC)
def preflight_settings() -> object:
    words = ("configs/tiny.toml", "--topology", "v5e-8", "--estimate", "--set", "model.layers=1")
    return _run_command("preflight", *words)


def _run_command(*words: str) -> object:
    """Run a command; raise the error for a missing name that it prints."""
    from xlashard._jax import private
    from xlashard.cli.main import main as cli

    made, printed, make = [], io.StringIO(), private.missing_name
    private.missing_name = lambda name: made.append(make(name)) or made[-1]
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(printed):
            code = cli(words)
    finally:
        private.missing_name = make
    for error in made:
        if code and str(error) in " ".join(printed.getvalue().split()):
            raise error
    assert code == 0, printed.getvalue()
    return None


@_feature(PRIVATE)
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
