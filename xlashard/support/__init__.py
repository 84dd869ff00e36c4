"""Modules that every floor may import: none of them knows arrays, programs or reports.

| module | contents |
|---|---|
| `lazily` | names, modules and methods of dataclasses that wait for their first use |
| `hooks` | modules of higher floors that lower ones call |
| `formatting` | amounts, types and lists in texts |
| `consoles` | output as a stream encodes it, and long work in progress |
| `tracebacks` | frames of this package left out of tracebacks |
| `documents` | TOML and JSON files as records, with a schema |
| `wire`, `kernel_module` | messages of protocol buffers; kernels of TPUs as records |
| `background` | work in threads and processes, and its end |
| `program_runner`, `lending` | scripts run as `__main__`; packages lent to another Python |
"""
