"""Reports on the programs of a script, as `xlashard explain --json` writes them."""

from xlashard.analysis.explain.script_report import ScriptReport as ScriptReport
from xlashard.analysis.explain.script_report import compare_scripts as compare_scripts
