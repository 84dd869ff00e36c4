"""Preflight reports as a self-contained HTML page.

| module or folder | contents |
| --- | --- |
| `page` | the page and the fragment for notebooks, from `templates/` and `assets/` |
| `charts`, `torus_drawing` | bars and roofline; mesh positions on the torus |
"""

from xlashard.preflights.render.html.page import fragment, page

__all__ = ["fragment", "page"]
