"""Takes the results of `make test-clients` into the table of the documents: `python tests/clients/record.py`.

What was not run stays as it was; each case has the commit at which it was run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests/support"))

from cases import CASES, LACKS, WRONG  # noqa: E402  its modules are in that folder

TABLE = ROOT / "docs/results/clients.json"
names = {(case.package.name, case.name) for case in CASES}
found = {(each["client"], each["case"]): each for each in json.loads(TABLE.read_text())["cases"]}
for path in sorted((ROOT / "build/clients").glob("*.json")):
    each = json.loads(path.read_text())
    found[each["client"], each["case"]] = each
cases = [{**found[name], "why_wrong": WRONG.get(name, "")} for name in sorted(found) if name in names]
TABLE.write_text(json.dumps({"cases": cases, "lacks": LACKS}, indent=1) + "\n")
