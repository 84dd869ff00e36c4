"""`xlashard legacy -- python script.py`: run a program, and report the removed names it uses.

| file | contents |
|---|---|
| `run_command` | running a program, and the words of `python -m xlashard.legacy` |
| `recorder`, `usage_report` | recording uses of removed names, and printing them |
"""
