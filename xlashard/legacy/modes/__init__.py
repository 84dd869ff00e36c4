"""`pjit` as of 2022 and 2023, in the array mode that the flags select for each call.

| file | contents |
|---|---|
| `config_flags` | `jax_array` and the other flags, and `ArrayMode` and `CallFlags` of a call |
| `pjit` | `pjit` and `with_sharding_constraint` |
| `mode_function` | a jitted function in one array mode |
| `host_local` | host-local arguments and results of a call, and the stages that take them |
| `pjit_internals` | internals of `jax.experimental.pjit` that programs call |
"""
