"""The main job: a byte-level transformer, trained over a mesh that a settings file describes.

| modules | what is in them |
|---|---|
| `settings`, `schema`, `toml`, `checks` | the settings file: its keys, its reader, what must fit |
| `layout`, `model`, `step`, `generate` | plain JAX functions from declared arrays to written text |
| `text`, `data` | text as bytes, windows by step number, batches on the mesh |
| `programs`, `loop`, `job`, `command` | compiled programs, the run that calls them, its command |
| `console`, `folder`, `curve` | what a person sees and finds |
| `interrupt`, `calls`, `stop`, `pod` | how processes agree on a run, and on where it stops |
| `checkpoint`, `resume` | the state of a run as files, and a run that goes on from them |

It needs the extra packages of ``pip install 'xlashard[train]'``, and is run by
``xlashard train --config FILE``.
"""
