"""Writes today's names into programs of 2022 and 2023: `xlashard legacy --migrate FILE`.

| file | contents |
|---|---|
| `rename_rules` | the rule for each removed name, from the entries |
| `resolver` | qualified names and assigned variables of a program |
| `call_rewrites`, `expressions` | rewriting calls, names and attribute chains |
| `imports`, `rewriter` | rewriting imports and statements, and adding comments |
| `migrated_program` | a whole program, with the helper functions that it needs |

It takes libcst, which the extra `legacy` brings.
"""

from xlashard.legacy.migration.migrated_program import Migrated, migrate

__all__ = ["Migrated", "migrate"]
