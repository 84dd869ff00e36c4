"""The private modules of JAX and jaxlib that this package uses, each behind a stand-in.

JAX moves and removes private names with any release. No other file of this package imports these
modules: they import the stand-ins from here, and write `core.Tracer` where they use it. A stand-in
imports its module when one of its names is first read, so that importing this package reads no
private name, and a name that a release of JAX lacks breaks the features that use it, and no others.

`names.toml` lists the names that are read; `python -m tests.private_names` writes it.
"""

import importlib
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from xlashard._jax import describe_requirement, describe_tested_versions, installed_version
from xlashard.errors import JaxVersionError, JaxVersionWarning
from xlashard.support.lazily import on_demand

_REPLACED = {
    "jax._src.cudnn.fused_attention_stablehlo": {"check_compute_capability", "check_cudnn_version"},
    "jax._src.dispatch": {"_device_put_impl"},
    "jax._src.interpreters.pxla": {
        *("_get_and_check_device_assignment", "check_array_xla_sharding_layout_match"),
        "is_default_layout",
    },
    "jax._src.lax.lax": {"full"},
    "jax._src.lib._jax": {"get_distributed_runtime_client"},
    "jax._src.mesh_utils": {"create_device_mesh", "create_hybrid_device_mesh"},
    "jax._src.pjit": {
        *("_infer_params", "_pjit_call_impl_python", "_resolve_and_lower", "_run_python_pjit"),
        "_trace_for_jit",
    },
    "jax._src.pmap": {"_mapped_axis_size"},
    "jax._src.xla_bridge": {"discover_pjrt_plugins"},
}
"""Names that this package replaces in JAX, by module. They are read anew at each use."""

_CONSTANTS = frozenset(
    {
        *("jax._src.core.abstract_token", "jax._src.core.pytype_aval_mappings"),
        *("jax._src.core.trace_ctx", "jax._src.distributed.global_state"),
        "jax._src.dispatch.prim_requires_devices_during_lowering",
        *("jax._src.mesh.thread_resources", "jax._src.tree_util.dispatch_registry"),
    }
)
"""Objects that JAX creates once and changes in place; placing an array and a trace read them."""

_ORIGINALS: dict[tuple[str, str], Any] = {}
"""Values of the replaced names before their first replacement."""


class _Reader:
    """The `__getattr__` of a stand-in: reads a name in the real module.

    Args:
        stand_in: The stand-in, which keeps what is read.
    """

    def __init__(self, stand_in: ModuleType) -> None:
        self._members = vars(stand_in)
        self._name = stand_in.__name__
        self._fresh = _REPLACED.get(self._name, frozenset())
        self._module: ModuleType | None = None

    def __call__(self, name: str) -> Any:
        module = self.load()
        try:
            value = getattr(module, name)
        except AttributeError:
            if name.startswith("__"):
                # Python itself looks for such names, and expects this error.
                raise
            # no-catalogue: needs a release of JAX that lacks a name
            raise missing_name(f"{self._name}.{name}") from None
        # JAX rebinds other values while it runs.
        is_constant = callable(value) or isinstance(value, ModuleType)
        if name not in self._fresh and (is_constant or f"{self._name}.{name}" in _CONSTANTS):
            self._members[name] = value
        return value

    def load(self) -> ModuleType:
        """Import the real module, once."""
        if self._module is None:
            self._module = _import_module(self._name)
        return self._module


def _import_module(name: str) -> ModuleType:
    """Import a module by the name of its file, or by a name that its parent has for it."""
    parent, _, member = name.rpartition(".")
    try:
        if parent:
            module = getattr(importlib.import_module(parent), member, None)
            if isinstance(module, ModuleType):
                return module
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        # no-catalogue: needs a release of JAX that lacks a module
        raise missing_name(name) from None


def missing_name(name: str) -> JaxVersionError:
    """Return the error for a private module or name that the installed JAX lacks."""
    feature, installed = _describe_feature(), installed_version()
    return JaxVersionError(
        f"{feature} uses {name}, which jax {installed} lacks: install a version that this xlashard "
        f"is tested with, pip install {describe_requirement()!r}, or a newer xlashard",
        feature=feature,
        private_name=name,
        installed=installed,
        tested=describe_tested_versions(),
    )


def _describe_feature() -> str:
    """Return the function of this package that the user called, such as `xlashard.device_put`."""
    own = f"{__package__}."
    frame = sys._getframe(1)
    door, feature = "xlashard", ""
    while frame is not None:
        module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_qualname
        if module.startswith(own):
            if module != __name__ and door == "xlashard":
                door = module
        elif module == on_demand.__module__ and function == f"{on_demand.__name__}.<locals>.member":
            # The import of a public name.
            feature = f"{frame.f_locals['package']}.{frame.f_locals['name']}"
        elif module.split(".")[0] == "xlashard" and "<" not in function.partition(".<")[0]:
            feature = _describe_function(module, function.partition(".<")[0]) or feature
        frame = frame.f_back
    return feature or door


def _describe_function(module: str, function: str) -> str:
    """Return the name of a public function or method; empty for a private one."""
    *classes, name = function.split(".")
    if name == "cache_miss":
        return "xlashard.pjit"  # jaxlib calls the method for a call of the user's function.
    if any(part.startswith("_") for part in classes) or (
        name.startswith("_") and not (classes and name.endswith("__"))
    ):
        return ""
    if classes:
        return function
    public = getattr(sys.modules.get("xlashard"), "__all__", ())
    return f"xlashard.{name}" if name in public else f"{module}.{name}"


def _stand_in(name: str) -> Any:
    """Return a stand-in for a module.

    It is a plain module, for which Python reads the names that it keeps as fast as those of the
    real one.
    """
    module = ModuleType(name)
    vars(module)["__getattr__"] = _Reader(module)
    return module


def real_module(stand_in: ModuleType) -> Any:
    """Return the module behind a stand-in."""
    return vars(stand_in)["__getattr__"].load()


def find_name(stand_in: ModuleType, name: str) -> Any:
    """Return a value that some of the tested versions of JAX lack; None where it is missing."""
    with suppress(JaxVersionError):
        return getattr(stand_in, name)
    return None


def replace_name(stand_in: ModuleType, name: str, value: Any) -> None:
    """Replace a name of JAX, one of `_REPLACED`, for JAX and for this package."""
    assert name in _REPLACED[stand_in.__name__], name
    _ORIGINALS.setdefault((stand_in.__name__, name), getattr(stand_in, name))
    setattr(real_module(stand_in), name, value)


def original_value(stand_in: ModuleType, name: str) -> Any:
    """Return what a name of JAX was before this package replaced it."""
    key = stand_in.__name__, name
    return _ORIGINALS[key] if key in _ORIGINALS else getattr(stand_in, name)


def try_steps(*steps: Callable[[], object]) -> None:
    """Take steps that stand alone; warn of a step for which JAX lacks a private name, and go on.

    Args:
        *steps: Functions, such as registrations of rules, of which each serves some features only.
    """
    for step in steps:
        try:
            step()
        except JaxVersionError as error:
            warnings.warn(str(error), JaxVersionWarning, stacklevel=2)


def find_libtpu() -> str | None:
    """Return the file of libtpu's package without importing it; None if it is not installed."""
    package = find_spec("libtpu")
    return None if package is None else package.origin


def read_lazily(
    members: dict[str, Any], readers: dict[str, Callable[[], Any]]
) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module, for values that private names of JAX define.

    Args:
        members: The module's names, to which a value is added when it is first read.
        readers: Functions that return the values.
    """

    def read(name: str) -> Any:
        reader = readers.get(name)
        if reader is None:
            module = members["__name__"]
            # no-catalogue: the error of any module
            raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name)
        value = members[name] = reader()
        return value

    return read


if TYPE_CHECKING:
    from jax._src import api as api
    from jax._src import api_util as api_util
    from jax._src import checkify as checkify
    from jax._src import cloud_tpu_init as cloud_tpu_init
    from jax._src import clusters as clusters
    from jax._src import compilation_cache as compilation_cache
    from jax._src import compiler as jax_compiler
    from jax._src import config as config
    from jax._src import core as core
    from jax._src import dispatch as jax_dispatch
    from jax._src import distributed as distributed
    from jax._src import dlpack as dlpack
    from jax._src import dtypes as dtypes
    from jax._src import effects as effects_lib
    from jax._src import hardware_utils as hardware_utils
    from jax._src import lib as lib
    from jax._src import linear_util as linear_util
    from jax._src import literals as literals
    from jax._src import mesh as mesh_lib
    from jax._src import mesh_utils as mesh_utils
    from jax._src import named_sharding as named_sharding
    from jax._src import pjit as jax_pjit
    from jax._src import pmap as pmap_lib
    from jax._src import random as random_lib
    from jax._src import sharding_impls as sharding_impls
    from jax._src import source_info_util as source_info_util
    from jax._src import traceback_util as traceback_util
    from jax._src import tree_util as tree_util
    from jax._src import util as util
    from jax._src import xla_bridge as xla_bridge
    from jax._src.clusters import cloud_tpu_cluster as cloud_tpu_cluster
    from jax._src.cudnn import fused_attention_stablehlo as cudnn
    from jax._src.interpreters import ad as ad
    from jax._src.interpreters import batching as batching
    from jax._src.interpreters import mlir as mlir
    from jax._src.interpreters import partial_eval as pe
    from jax._src.interpreters import pxla as pxla
    from jax._src.interpreters import remat as remat
    from jax._src.lax import eval_jaxpr as eval_jaxpr
    from jax._src.lax import lax as lax_lib
    from jax._src.lax import linalg as linalg
    from jax._src.lib import _jax as lib_jax
    from jax._src.lib import guard_lib as guard_lib
    from jax._src.lib import hlo as hlo_lib
    from jax._src.lib import tpu as tpu_dialect
    from jax._src.lib import xla_client as xc
    from jax._src.lib.mlir import ir as ir
    from jax._src.lib.mlir import passmanager as passmanager
    from jax._src.lib.mlir.dialects import func as func_dialect
    from jax._src.lib.mlir.dialects import hlo as hlo_dialect
    from jax._src.lib.mlir.dialects import sdy as sdy
    from jax._src.random import prng as prng
    from jax._src.state import discharge as discharge
    from jax._src.state import types as state_types
    from jax.extend import backend as extend_backend
    from jax.extend import core as extend_core
    from jax.extend import linear_util as extend_linear_util
    from jax.extend import random as extend_random
    from jaxlib import gpu_solver as gpu_solver
    from jaxlib import plugin_support as plugin_support
    from jaxlib.mlir.dialects import mhlo as mhlo
else:
    ad = _stand_in("jax._src.interpreters.ad")
    api = _stand_in("jax._src.api")
    api_util = _stand_in("jax._src.api_util")
    batching = _stand_in("jax._src.interpreters.batching")
    checkify = _stand_in("jax._src.checkify")
    cloud_tpu_cluster = _stand_in("jax._src.clusters.cloud_tpu_cluster")
    cloud_tpu_init = _stand_in("jax._src.cloud_tpu_init")
    clusters = _stand_in("jax._src.clusters")
    compilation_cache = _stand_in("jax._src.compilation_cache")
    config = _stand_in("jax._src.config")
    core = _stand_in("jax._src.core")
    cudnn = _stand_in("jax._src.cudnn.fused_attention_stablehlo")
    discharge = _stand_in("jax._src.state.discharge")
    distributed = _stand_in("jax._src.distributed")
    dlpack = _stand_in("jax._src.dlpack")
    dtypes = _stand_in("jax._src.dtypes")
    effects_lib = _stand_in("jax._src.effects")
    eval_jaxpr = _stand_in("jax._src.lax.eval_jaxpr")
    extend_backend = _stand_in("jax.extend.backend")
    extend_core = _stand_in("jax.extend.core")
    extend_linear_util = _stand_in("jax.extend.linear_util")
    extend_random = _stand_in("jax.extend.random")
    func_dialect = _stand_in("jax._src.lib.mlir.dialects.func")
    gpu_solver = _stand_in("jaxlib.gpu_solver")
    guard_lib = _stand_in("jax._src.lib.guard_lib")
    hardware_utils = _stand_in("jax._src.hardware_utils")
    hlo_dialect = _stand_in("jax._src.lib.mlir.dialects.hlo")
    hlo_lib = _stand_in("jax._src.lib.hlo")
    ir = _stand_in("jax._src.lib.mlir.ir")
    jax_compiler = _stand_in("jax._src.compiler")
    jax_dispatch = _stand_in("jax._src.dispatch")
    jax_pjit = _stand_in("jax._src.pjit")
    lib = _stand_in("jax._src.lib")
    lib_jax = _stand_in("jax._src.lib._jax")
    lax_lib = _stand_in("jax._src.lax.lax")
    linalg = _stand_in("jax._src.lax.linalg")
    linear_util = _stand_in("jax._src.linear_util")
    literals = _stand_in("jax._src.literals")
    mesh_lib = _stand_in("jax._src.mesh")
    mesh_utils = _stand_in("jax._src.mesh_utils")
    mhlo = _stand_in("jaxlib.mlir.dialects.mhlo")
    mlir = _stand_in("jax._src.interpreters.mlir")
    named_sharding = _stand_in("jax._src.named_sharding")
    passmanager = _stand_in("jax._src.lib.mlir.passmanager")
    pe = _stand_in("jax._src.interpreters.partial_eval")
    plugin_support = _stand_in("jaxlib.plugin_support")
    pmap_lib = _stand_in("jax._src.pmap")
    prng = _stand_in("jax._src.random.prng")
    pxla = _stand_in("jax._src.interpreters.pxla")
    random_lib = _stand_in("jax._src.random")
    remat = _stand_in("jax._src.interpreters.remat")
    sdy = _stand_in("jax._src.lib.mlir.dialects.sdy")
    sharding_impls = _stand_in("jax._src.sharding_impls")
    source_info_util = _stand_in("jax._src.source_info_util")
    state_types = _stand_in("jax._src.state.types")
    tpu_dialect = _stand_in("jax._src.lib.tpu")
    traceback_util = _stand_in("jax._src.traceback_util")
    tree_util = _stand_in("jax._src.tree_util")
    util = _stand_in("jax._src.util")
    xc = _stand_in("jax._src.lib.xla_client")
    xla_bridge = _stand_in("jax._src.xla_bridge")
