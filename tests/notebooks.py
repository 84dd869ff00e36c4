"""Run the cells of a notebook in IPython: `python -m tests.notebooks FILE`.

Prints a JSON object: by a cell's id its printed text (`stdout`), the value of its last line in
every form that IPython's display hook offers a notebook (`value`, by MIME type), other displays
(`displays`), and its exception (`error`), after which no cell runs. A kernel of Jupyter sends the
browser what the hook and the publisher receive here.
"""

import json
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell


class _Hook(DisplayHook):
    """Display hook that keeps the forms of a value and prints nothing."""

    def write_output_prompt(self) -> None: ...

    def write_format_data(self, format_dict: dict[str, Any], md_dict: Any = None) -> None:
        self.shell.values.append(format_dict)

    def finish_displayhook(self) -> None: ...


class ZMQInteractiveShell(InteractiveShell):
    """Shell of a notebook; rich takes one of this name for Jupyter's."""

    displayhook_class = _Hook
    display_pub_class = CapturingDisplayPublisher

    def __init__(self, **options: Any) -> None:
        self.values: list[dict[str, Any]] = []
        super().__init__(**options)


def code_cells(path: Path) -> list[dict[str, Any]]:
    """Return the cells of a notebook that have code."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def run(path: Path) -> dict[str, dict[str, Any]]:
    """Run the cells of a notebook in this process; return the output of each, by its id."""
    outputs: dict[str, dict[str, Any]] = {}
    shell = ZMQInteractiveShell.instance(colors="nocolor")
    for cell in code_cells(path):
        with redirect_stdout(StringIO()) as text:
            outcome = shell.run_cell("".join(cell["source"]), store_history=True)
        error = outcome.error_before_exec or outcome.error_in_exec
        outputs[cell["id"]] = {
            "stdout": text.getvalue(),
            "value": shell.values.pop() if shell.values else {},
            "displays": [shown["data"] for shown in shell.display_pub.outputs],
            "error": "" if error is None else repr(error),
        }
        shell.display_pub.outputs.clear()
        if error is not None:
            break
    return outputs


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]))))
