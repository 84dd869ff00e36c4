"""`python -m xlashard.legacy script.py ARGS`: runs a program of 2022 or 2023 as it is."""

import sys

from xlashard.legacy.run_command import main

sys.exit(main(sys.argv[1:]))
