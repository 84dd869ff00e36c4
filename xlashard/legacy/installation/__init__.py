"""Installing the removed names into JAX's modules, and uninstalling them.

| file | contents |
|---|---|
| `installer` | which names go where, and back |
| `module_shims` | modules that replace removed ones |
| `import_hook` | patching a module of JAX after its first import |
| `removed_api` | objects whose use raises `RefusedError` |
"""
