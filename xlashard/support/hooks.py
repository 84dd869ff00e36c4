"""Modules of higher floors that lower ones call, each imported at its first call.

| hook | called by |
|---|---|
| `jax_errors` | `errors`, for JAX's class of a mistake |
| `startup` | `config`, for environment variables that concern JAX |
| `pictures` | `Array`, for the picture in a notebook |
| `recompile_report` | the log of cache misses, for a line or a report |
| `planner` | `pjit`, for a sharding that is `AUTO` |
"""

from typing import Any

from xlashard.support.lazily import deferred

jax_errors: Any = deferred("xlashard._jax.error_classes")
startup: Any = deferred("xlashard.startup")
pictures: Any = deferred("xlashard.analysis.pictures.sharding_picture")
recompile_report: Any = deferred("xlashard.analysis.recompile.recompile_report")
planner: Any = deferred("xlashard.auto.planner")
