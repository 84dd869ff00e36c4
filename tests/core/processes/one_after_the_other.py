"""Run several scripts in the same processes of a pod: `python one_after_the_other.py SCRIPT ...`.

A JAX process takes seconds to start, and most scripts take less than that themselves.
"""

import runpy
import sys
from pathlib import Path

from tests.core.processes import join_the_others

join_the_others()
for script in sys.argv[1:]:
    print(f"--- {Path(script).name}", flush=True)
    runpy.run_path(script, run_name="__main__")
