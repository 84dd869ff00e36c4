"""Preflight reports as a self-contained HTML page.

| module | contents |
| --- | --- |
| `document` | the page, with its style, script, embedded JSON, and tables of a comparison |
| `markup` | escaped HTML elements, and tables that sort and filter |
| `verdict` | outcome and key figures; one row per report for several reports |
| `memory_bar`, `timing` | memory bar; time bars and roofline |
| `torus_drawing` | mesh positions on the torus, and their drawing |
| `report_tables` | tables of collectives, shardings and donations |
"""

from xlashard.tpu.preflight.render.html.document import fragment, page

__all__ = ["fragment", "page"]
