"""`pjit` as of 2022 and 2023, in the array mode that the flags select for each call.

| file | contents |
|---|---|
| `config_flags` | `jax_array` and the other flags of the era |
| `array_mode` | `ArrayMode`, `CallFlags` and `PositionalSemantics`, read once per call |
| `pjit` | `pjit` and `with_sharding_constraint` |
| `mode_function`, `mode_stages` | a jitted function and its stages in one array mode |
| `host_local` | host-local arguments and results of a call |
| `result_classes` | the array class of a result |
| `spmd_mode` | the refusal of eager operations that `jax_spmd_mode` forbids |
| `pjit_internals` | internals of `jax.experimental.pjit` that programs call |
"""
