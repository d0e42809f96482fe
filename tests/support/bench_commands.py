"""Commands that run vLLM's engines in their own process, one after another in one, because its imports take long.

python tests/support/bench_commands.py
"""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from background import CommandResult

from weft.commands import cli

OPTIONS = (
    "chat --programs 10 --scale 0.03 --rates 3 --closed --rounds 2 --seed 5 --batch-size 2 --kv-tokens 600 "
    "--baselines stock-fcfs,atlas,stock-again,atlas+next-use,stock-plain"
)
bench_commands = pytest.mark.background(Path(__file__))


def printed(command_result: CommandResult, name: str) -> str:
    """What a command printed on standard output. Fails if any of them failed."""
    command_result.printed()
    return (command_result.folder / f"{name}.txt").read_text()


def run(name: str, options: str) -> tuple[int, str]:
    """Run `weft OPTIONS`. What it prints goes to `NAME.txt`; returns its exit code, and what is on standard error."""
    sys.argv = ["weft", *options.split()]
    with Path(f"{name}.txt").open("w") as out, redirect_stdout(out), redirect_stderr(StringIO()) as errors:
        code = cli.main()
    return code, errors.getvalue()


def check(name: str, options: str) -> None:
    """Run a command that must succeed."""
    code, errors = run(name, options)
    assert code == 0, errors
    assert "Traceback" not in errors, errors


def main() -> None:
    """A complete session, one whose journal has lost its last round, one with other settings, and a profile."""
    bench = f"bench {OPTIONS} --out"
    check("bench", f"{bench} results")
    shutil.copytree("results", "again")
    journal = Path("again/rounds.jsonl")
    journal.write_text("".join(journal.read_text().splitlines(keepends=True)[:-1]))
    check("again", f"{bench} again")
    refused = run("refused", f"{bench} results".replace("--seed 5", "--seed 6"))
    Path("refused.json").write_text(json.dumps(refused))
    check("profile", "profile tiny --out engine.json --max-num-seqs 4 --kv-tokens 8192")
    with Path("trace.jsonl").open("w") as trace:
        for n in range(6):
            calls = [{"id": f"c{k}", "prompt_tokens": 200 * (k + 1), "output_tokens": 30} for k in range(3)]
            trace.write(json.dumps({"program": f"p{n}", "calls": calls}) + "\n")
    check("advise", "advise trace.jsonl --engine engine.json --host-kv-gib 1")


if __name__ == "__main__":
    main()
