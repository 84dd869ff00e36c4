"""The migration era: programs of 2022 and 2023 on today's JAX.

| modules | what is in them |
|---|---|
| `table` | every name of the era: since when it is gone, and what is done about it |
"""
