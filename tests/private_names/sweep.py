"""Hide each private name once, and print the features that break without it.

python -m tests.private_names.sweep [NAME ...]

A name that few features need and that breaks many has too large a reach.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.device_counts import emulate_devices
from tests.fork_server import python_command
from tests.private_names.features import FEATURES
from tests.private_names.names import read_uses

ROOT = Path(__file__).resolve().parents[2]


def run_features(**request: Any) -> dict[str, Any]:
    """Run features in a process of their own, and return their outcomes."""
    environment = {
        **os.environ,
        **emulate_devices(2),
        "XLASHARD_DOCS_URL": "",
    }
    request.setdefault("features", list(FEATURES))
    command = [*python_command(environment), "-m", "tests.private_names.features"]
    done = subprocess.run(
        [*command, json.dumps(request)], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    if done.returncode:
        # A crash of the process is an outcome, too.
        crash = {"error": f"exit status {done.returncode}", "text": done.stderr[-500:]}
        return {"features": dict.fromkeys(request["features"], crash), "reads": []}
    return json.loads(done.stdout.splitlines()[-1])


def _record_feature(feature: str) -> tuple[str, frozenset[str]]:
    """Return the names that a feature reads, the import of xlashard included."""
    return feature, frozenset(run_features(features=[feature], record=True)["reads"])


def main(words: list[str]) -> int:
    """Run the sweep and print its table."""
    names = words or [use.full for use in read_uses()]
    with ThreadPoolExecutor(2) as pool:
        reads = dict(pool.map(_record_feature, FEATURES))

        def hide(name: str) -> tuple[str, dict[str, Any]]:
            # A name that a feature doesn't read can't break it.
            affected = [feature for feature, read in reads.items() if name in read]
            return name, run_features(features=affected, hidden=[name])["features"]

        breaks: Counter[str] = Counter()
        for name, outcomes in pool.map(hide, names):
            broken = {feature: facts["error"] for feature, facts in outcomes.items() if facts}
            others = sorted({error for error in broken.values() if error != "JaxVersionError"})
            breaks.update(list(broken))
            print(f"{name}: read by {len(outcomes)}, breaks {' '.join(broken) or 'none'}", *others)
            sys.stdout.flush()
    print("\nnames that break each feature:")
    for feature in FEATURES:
        print(f"  {breaks[feature]:4} {feature} (reads {len(reads[feature])})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
