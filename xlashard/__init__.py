"""xlashard shows what a sharded JAX program does before it runs, and reimplements JAX's Array,
Sharding and pjit layer in Python on today's jax and jaxlib.

Importing it neither imports JAX nor changes anything in it; each name is imported when it is first
read. Environment variables that concern JAX (`xlashard.config`) are applied at import.

Example:
    >>> import jax
    >>> import numpy as np
    >>> import xlashard
    >>> from xlashard import Mesh, NamedSharding, P
    >>> mesh = Mesh(np.array(jax.devices()), ("data",))
    >>> x = xlashard.device_put(np.ones((16, 4)), NamedSharding(mesh, P("data")))
    >>> xlashard.pjit(lambda x: x.sum())(x)
    Array(64., dtype=float32)
"""  # noqa: D205 (the sentence of the README takes two lines)

import os as _os
import typing as _typing

from xlashard._version import __version__

_refused: Exception | None = None
if any(_name.startswith("XLASHARD_") for _name in _os.environ):
    from xlashard.config import apply_environment as _apply_environment
    from xlashard.errors import ConfigError as _ConfigError

    try:
        _apply_environment(_os.environ)
    except _ConfigError as _error:
        # Raised when a name is first read; the command line prints it.
        _refused = _error

# Names that `__all__` lacks are of 2022; `xlashard.legacy` lists them.
if _typing.TYPE_CHECKING:
    from jax import P, make_mesh, set_mesh
    from jax.sharding import (
        AbstractMesh,
        AxisType,
        Mesh,
        PartitionSpec,
        get_abstract_mesh,
        get_mesh,
        use_abstract_mesh,
    )

    from xlashard import errors as errors
    from xlashard import geometry as geometry
    from xlashard import gpu as gpu
    from xlashard import hardware as hardware
    from xlashard import hlo as hlo
    from xlashard import multihost as multihost
    from xlashard import numpy as numpy
    from xlashard import preflights as preflights
    from xlashard import testing as testing
    from xlashard import tpu as tpu
    from xlashard.analysis.explain.explain import explain
    from xlashard.analysis.explain.program_report import ProgramReport
    from xlashard.analysis.pictures.sharding_picture import (
        ShardingPicture,
        TreePicture,
        visualize,
    )
    from xlashard.analysis.programs.from_script import RecordedProgram, record_programs
    from xlashard.analysis.recompile.explain_recompile import (
        explain_recompile,
        watch,
    )
    from xlashard.analysis.recompile.recompile_report import RecompileReport
    from xlashard.auto.auto_shard import auto_shard
    from xlashard.auto.plan.auto_plan import AutoPlan
    from xlashard.core.array import Array, device_put
    from xlashard.core.array.array_class.handles import key_shards, live_arrays
    from xlashard.core.array.array_class.shard import Shard
    from xlashard.core.array.constructors import (
        make_array_from_callback,
        make_array_from_process_local_data,
    )
    from xlashard.core.array.device_buffers import make_array_from_single_device_arrays
    from xlashard.core.array.device_put import device_get
    from xlashard.core.array.dlpack import from_dlpack
    from xlashard.core.array.reshard.report import ReshardReport, reshard_plan
    from xlashard.core.pjit.api import jit, pjit, reshard, shard_map
    from xlashard.core.pjit.constraint import with_sharding_constraint
    from xlashard.core.pjit.padding import pad_to_mesh, unpad
    from xlashard.core.pjit.shardings.resources import AUTO, UNSPECIFIED
    from xlashard.core.pjit.stages.bound_step import BoundStep
    from xlashard.core.pjit.stages.compiled import Compiled
    from xlashard.core.pjit.stages.stablehlo import StableHLOProgram, compile_stablehlo
    from xlashard.core.pjit.stages.traced import Lowered, Traced
    from xlashard.core.pjit.state_shapes import eval_shape
    from xlashard.core.sharding import (
        GSPMDSharding,
        NamedSharding,
        Sharding,
        SingleDeviceSharding,
    )
    from xlashard.legacy import FROM_GDA as FROM_GDA
    from xlashard.legacy import Chunked as Chunked
    from xlashard.legacy import NoSharding as NoSharding
    from xlashard.legacy import OpShardingSharding as OpShardingSharding
    from xlashard.legacy import PmapSharding as PmapSharding
    from xlashard.legacy import Replicated as Replicated
    from xlashard.legacy import ShardedAxis as ShardedAxis
    from xlashard.legacy import ShardingSpec as ShardingSpec
    from xlashard.legacy import Unstacked as Unstacked
    from xlashard.legacy import XLACompatibleSharding as XLACompatibleSharding
    from xlashard.legacy import device_put_replicated as device_put_replicated
    from xlashard.legacy import device_put_sharded as device_put_sharded
    from xlashard.legacy import make_device_array as make_device_array
    from xlashard.legacy import make_sharded_device_array as make_sharded_device_array
    from xlashard.legacy import unstacked_shards as unstacked_shards
    from xlashard.pods.multihost.global_batches import GlobalBatches
    from xlashard.pods.multihost.load_safetensors import load_safetensors
    from xlashard.predict.preflight.preflight_run import preflight
    from xlashard.predict.preflight.report.preflight_report import PreflightReport
    from xlashard.predict.sweep.sweep_report import SweepReport
    from xlashard.predict.sweep.sweep_run import preflight_sweep
else:
    from xlashard.support.lazily import on_demand as _on_demand

    _modules = (
        *("errors", "geometry", "gpu", "hardware", "hlo", "multihost", "numpy", "preflights"),
        *("testing", "tpu"),
    )
    _member, _ = _on_demand(
        __name__,
        globals(),
        {
            **{f"{__name__}.{module}": (module,) for module in _modules},
            "jax": ("P", "make_mesh", "set_mesh"),
            "jax.sharding": (
                *("AbstractMesh", "AxisType", "Mesh", "PartitionSpec"),
                *("get_abstract_mesh", "get_mesh", "use_abstract_mesh"),
            ),
            "xlashard.analysis.explain.explain": ("explain",),
            "xlashard.analysis.explain.program_report": ("ProgramReport",),
            "xlashard.analysis.pictures.sharding_picture": (
                *("ShardingPicture", "TreePicture", "visualize"),
            ),
            "xlashard.analysis.recompile.explain_recompile": (*("explain_recompile", "watch"),),
            "xlashard.analysis.recompile.recompile_report": ("RecompileReport",),
            "xlashard.auto.auto_shard": ("auto_shard",),
            "xlashard.auto.plan.auto_plan": ("AutoPlan",),
            "xlashard.core.array": ("Array", "device_put"),
            "xlashard.core.array.constructors": (
                *("make_array_from_callback", "make_array_from_process_local_data"),
            ),
            "xlashard.core.array.array_class.handles": ("key_shards", "live_arrays"),
            "xlashard.core.array.array_class.shard": ("Shard",),
            "xlashard.core.array.device_buffers": ("make_array_from_single_device_arrays",),
            "xlashard.core.array.device_put": ("device_get",),
            "xlashard.core.array.dlpack": ("from_dlpack",),
            "xlashard.core.array.reshard.report": ("ReshardReport", "reshard_plan"),
            "xlashard.core.pjit.api": ("jit", "pjit", "reshard", "shard_map"),
            "xlashard.core.pjit.constraint": ("with_sharding_constraint",),
            "xlashard.core.pjit.padding": ("pad_to_mesh", "unpad"),
            "xlashard.core.pjit.shardings.resources": ("AUTO", "UNSPECIFIED"),
            "xlashard.core.pjit.stages.bound_step": ("BoundStep",),
            "xlashard.core.pjit.stages.compiled": ("Compiled",),
            "xlashard.analysis.programs.from_script": ("RecordedProgram", "record_programs"),
            "xlashard.core.pjit.stages.stablehlo": ("StableHLOProgram", "compile_stablehlo"),
            "xlashard.core.pjit.stages.traced": ("Lowered", "Traced"),
            "xlashard.core.pjit.state_shapes": ("eval_shape",),
            "xlashard.core.sharding": (
                *("GSPMDSharding", "NamedSharding", "Sharding", "SingleDeviceSharding"),
            ),
            "xlashard.legacy": (
                *("Chunked", "FROM_GDA", "NoSharding", "OpShardingSharding", "PmapSharding"),
                *("Replicated", "ShardedAxis", "ShardingSpec", "Unstacked"),
                *("XLACompatibleSharding", "device_put_replicated", "device_put_sharded"),
                *("make_device_array", "make_sharded_device_array", "unstacked_shards"),
            ),
            "xlashard.pods.multihost.global_batches": ("GlobalBatches",),
            "xlashard.pods.multihost.load_safetensors": ("load_safetensors",),
            "xlashard.predict.preflight.preflight_run": ("preflight",),
            "xlashard.predict.preflight.report.preflight_report": ("PreflightReport",),
            "xlashard.predict.sweep.sweep_report": ("SweepReport",),
            "xlashard.predict.sweep.sweep_run": ("preflight_sweep",),
        },
    )

    def __getattr__(name: str) -> object:
        """Import a name."""
        if _refused is not None and not name.startswith("__"):
            raise _refused.with_traceback(None)
        return _member(name)


__all__ = [
    "AUTO",
    "UNSPECIFIED",
    "AbstractMesh",
    "Array",
    "AutoPlan",
    "AxisType",
    "BoundStep",
    "Compiled",
    "GSPMDSharding",
    "GlobalBatches",
    "Lowered",
    "Mesh",
    "NamedSharding",
    "P",
    "PartitionSpec",
    "PreflightReport",
    "ProgramReport",
    "RecompileReport",
    "RecordedProgram",
    "ReshardReport",
    "Shard",
    "Sharding",
    "ShardingPicture",
    "SingleDeviceSharding",
    "StableHLOProgram",
    "SweepReport",
    "Traced",
    "TreePicture",
    "__version__",
    "auto_shard",
    "compile_stablehlo",
    "device_get",
    "device_put",
    "eval_shape",
    "explain",
    "explain_recompile",
    "from_dlpack",
    "get_abstract_mesh",
    "get_mesh",
    "jit",
    "key_shards",
    "live_arrays",
    "load_safetensors",
    "make_array_from_callback",
    "make_array_from_process_local_data",
    "make_array_from_single_device_arrays",
    "make_mesh",
    "pad_to_mesh",
    "pjit",
    "preflight",
    "preflight_sweep",
    "record_programs",
    "reshard",
    "reshard_plan",
    "set_mesh",
    "shard_map",
    "unpad",
    "use_abstract_mesh",
    "visualize",
    "watch",
    "with_sharding_constraint",
]


def __dir__() -> list[str]:
    """List the public names and modules."""
    return sorted((*__all__, "errors", "hlo", "multihost", "numpy", "testing", "tpu"))
