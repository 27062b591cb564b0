"""`python -m tinsmith` is the `tinsmith` command."""

import sys

from tinsmith.cli.main import main

sys.exit(main())
