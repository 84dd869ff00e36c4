"""Makes ``python -m xlashard`` the command line."""

import sys

from xlashard.cli import main

sys.exit(main())
