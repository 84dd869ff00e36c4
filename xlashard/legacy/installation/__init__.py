"""Installing the removed names into JAX's modules, and uninstalling them.

| file | contents |
|---|---|
| `installer` | which names go where, and back |
| `module_shims` | modules that replace removed ones, and patches of modules after their import |
"""
