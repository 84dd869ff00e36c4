"""Rewriting of programs of 2022 and 2023 for today's JAX: `xlashard legacy --migrate FILE`.

| file | contents |
|---|---|
| `resolver` | qualified names and assigned variables of a program; the rule for each removed name |
| `names`, `calls` | rewriting imports, names and attribute chains; rewriting calls |
| `migrated_program` | rewriting statements and a whole program |
| `inserted_functions` | functions that programs get where one expression is not enough |
| `check`, `recorded_run` | comparing runs of the old and the migrated program |

It requires libcst, which the extra `legacy` installs.
"""

from xlashard.legacy.migration.check import CheckResult, check_migration
from xlashard.legacy.migration.migrated_program import Migrated, migrate

__all__ = ["CheckResult", "Migrated", "check_migration", "migrate"]
