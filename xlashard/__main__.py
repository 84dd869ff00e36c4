"""Makes ``python -m xlashard`` the command line."""

import sys

from xlashard.cli.main import main

sys.exit(main())
