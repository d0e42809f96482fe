"""Gathers the results of `make test-clients` for the table of the documents: `python tests/clients/record.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests/support"))

from cases import WRONG  # noqa: E402  its modules are in that folder

commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
cases = [json.loads(path.read_text()) for path in sorted((ROOT / "build/clients").glob("*.json"))]
for case in cases:
    case["why_wrong"] = WRONG.get((case["client"], case["case"]), "")
found = {"commit": commit.stdout.strip(), "cases": cases}
(ROOT / "docs/results/clients.json").write_text(json.dumps(found, indent=1) + "\n")
