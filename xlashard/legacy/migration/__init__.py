"""Writes today's names into programs of 2022 and 2023: `xlashard legacy --migrate FILE`.

| modules | what is in them |
|---|---|
| `names` | what becomes of each name, on the basis of the table |
| `resolve`, `facts` | the full names of what stands in a program, and what its variables are |
| `calls`, `expressions` | calls, names and chains of attributes, rewritten |
| `imports`, `rewriter` | imports and statements, rewritten and marked |
| `helpers` | functions that a program gets where one expression is not enough |
| `program` | a whole program |

It takes libcst, which the extra `legacy` brings.
"""

from xlashard.legacy.migration.program import Migrated, migrate

__all__ = ["Migrated", "migrate"]
