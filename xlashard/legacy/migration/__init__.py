"""Rewriting of programs of 2022 and 2023 for today's JAX: `xlashard legacy --migrate FILE`.

| file | contents |
|---|---|
| `resolver` | qualified names and assigned variables of a program; the rule for each removed name |
| `call_rewrites`, `expressions` | rewriting calls, names and attribute chains |
| `rewriter` | rewriting imports and statements, and adding comments |
| `migrated_program` | a whole program, with the helper functions that it needs |

It requires libcst, which the extra `legacy` installs.
"""

from xlashard.legacy.migration.migrated_program import Migrated, migrate

__all__ = ["Migrated", "migrate"]
