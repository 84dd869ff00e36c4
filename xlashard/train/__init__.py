"""The main job: a byte-level transformer, trained over a mesh that a settings file describes.

| modules | what is in them |
|---|---|
| `settings`, `schema`, `toml`, `checks` | the settings file: its keys, its reader, what must fit |
| `layout`, `model`, `step`, `generate` | plain JAX functions from declared arrays to written text |
| `data` | text as bytes, windows by step number, batches on the mesh |
| `programs`, `job`, `command` | the compiled programs, the run that calls them, its command |
| `console`, `folder`, `curve`, `interrupt` | what a person sees, finds and can stop |

It needs the extra packages of ``pip install 'xlashard[train]'``, and is run by
``xlashard train --config FILE``.
"""
