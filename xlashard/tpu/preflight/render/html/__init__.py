"""Preflight reports as a self-contained HTML page.

| module or folder | contents |
| --- | --- |
| `page` | the page and the fragment for notebooks, from `templates/` and `assets/` |
| `markup` | Jinja environment: escaped text, filters |
| `bars`, `roofline`, `torus_drawing` | bars of memory and time; plot; mesh positions on the torus |
"""

from xlashard.tpu.preflight.render.html.page import fragment, page

__all__ = ["fragment", "page"]
