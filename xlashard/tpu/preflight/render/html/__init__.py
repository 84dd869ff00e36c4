"""A preflight report as one HTML page, which needs nothing from elsewhere.

| module | what it makes |
|---|---|
| `markup`, `quantities`, `tables` | elements that escape what is in them; numbers; tables |
| `verdict` | whether it fits and what it takes, in one look; a row of it for several reports |
| `memory`, `timing`, `roofline` | bars of a device's memory and of the step's time; the roofline |
| `placing`, `torus` | where on the torus each position of the mesh lies, and the drawing of it |
| `collectives`, `values`, `environment` | the tables that sort and filter, and the small print |
| `changes` | what changed from one report to another |
| `document` | the page, its style and its script |
"""

from xlashard.tpu.preflight.render.html.document import fragment, page

__all__ = ["fragment", "page"]
