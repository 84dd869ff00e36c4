"""The layer itself: shardings, arrays, programs and `pjit`.

| folder | contents |
|---|---|
| `sharding/` | `NamedSharding` and its siblings, conversion to and from JAX's classes and HLO's |
| `processes/` | barriers, key-value store and comparison of values between processes |
| `program/` | StableHLO modules with shardings, compiled, run, saved |
| `array/` | `Array`, its constructors, `device_put` and resharding |
| `pjit/` | Python functions as programs: trace, resolve, lower, compile, dispatch |

Importing it registers with JAX what all of them need; arrays and shardings are registered where
they are defined.
"""

from xlashard._jax import registration

registration.install()
