"""Rewriting of programs of 2022 and 2023 for today's JAX: `xlashard legacy --migrate FILE`.

| file | contents |
|---|---|
| `resolver` | qualified names and assigned variables of a program; the rule for each removed name |
| `names`, `calls` | rewriting imports, names and attribute chains; rewriting calls |
| `migrated_program` | rewriting statements and a whole program, with the functions that it needs |

It requires libcst, which the extra `legacy` installs.
"""

from xlashard.legacy.migration.migrated_program import Migrated, migrate

__all__ = ["Migrated", "migrate"]
