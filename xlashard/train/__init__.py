"""Training job: a decoder-only transformer over a mesh that a settings file describes.

| module | contents |
|---|---|
| `command` | `xlashard train`: arguments, devices, exit code |
| `config/` | settings, their schema, TOML |
| `data` | corpus, sampling of windows by step number, batches on the mesh |
| `model/` | layout, transformer, training step, compiled programs |
| `loop/` | run folder, steps, console, stop and resume, agreement between processes |
| `checkpoint/` | atomic checkpoints with digests |
| `formulas` | parameters, bytes and model FLOP of a step in closed form |

It requires the extra packages of ``pip install 'xlashard[train]'``.
"""
