"""Names that Python, NumPy, optax, flax and packages of 2022 took away, for the runner alone.

| module | contents |
|---|---|
| `entries` | every such name: since which release, and what to write today |
| `installation` | gives names, and defaults of 2022, back for one run; lists those in use |
| `numpy_names`, `optax_names`, `python_names` | their definitions, where today's library has none |
| `imp`, `pkg_resources` | modules that are missing today |

A name is given back only where the library that is installed lacks it: an entry never replaces an
object of a library.
"""
