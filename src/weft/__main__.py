"""`python -m weft` runs the `weft` command."""

from __future__ import annotations

import sys

from weft.commands.cli import main

sys.exit(main())
