"""`python -m xlashard.legacy`: run an unchanged program, and report the removed names it uses.

| file | contents |
|---|---|
| `run_command` | the command line |
| `recorder`, `usage_report` | recording uses of removed names, and printing them |
"""
