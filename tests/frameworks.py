"""The integrations on the oldest and on the newest frameworks that pyproject.toml allows: `make test-frameworks`.

    python tests/frameworks.py [oldest] [newest]

Each set is an environment of its own in build/frameworks, without vLLM: `weft.testing` stands for an engine. uv
resolves it, with the lowest version that pyproject.toml allows of each direct requirement, or the highest.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build/frameworks"
RESOLUTIONS = {"oldest": "lowest-direct", "newest": "highest"}
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
# Given to uv as they are: what an extra of the wheel requires is not direct, and uv would take the highest of it.
FRAMEWORKS = [each for extra in ("langchain", "autogen", "openai", "otel") for each in EXTRAS[extra]]
# What the tests need besides; jinja2 and uvicorn come with vLLM.
TOOLS = (
    "autogen-ext[openai]>=0.7.2",
    "fastapi>=0.115",
    "hypothesis>=6.130",
    "jinja2>=3.1",
    "psutil>=6",
    "pytest>=9.0",
    "pytest-asyncio>=1.0",
    "pytest-timeout>=2.4",
    "uvicorn>=0.54",
)
TESTS = ("tests/integrations", "tests/test_testing.py", "tests/test_scripted.py")
SHOWN = ("langchain", "langgraph", "openai", "anthropic", "autogen", "opentelemetry")


def run(*command: str | Path, **environment: str) -> str:
    """The output of a command. A failure ends the script."""
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\n{' '.join(map(str, command))} ended with {done.returncode}")
    return done.stdout


def test(end: str, uv: str, wheel: Path) -> None:
    """Make the environment of one end and run the tests in it."""
    venv = WORK / end
    run(uv, "venv", "--quiet", "--clear", "--python", sys.executable, venv)
    resolution = ("--resolution", RESOLUTIONS[end])
    python = venv / "bin/python"
    run(uv, "pip", "install", "--quiet", "--python", python, *resolution, wheel, *FRAMEWORKS, *TOOLS)
    packages = run(uv, "pip", "freeze", "--quiet", "--python", python).split()
    sys.stdout.write(f"{end}: {' '.join(each for each in packages if each.startswith(SHOWN))}\n")
    marks = "not engine and not slow and not clients and not soak"
    found = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks, *TESTS, PYTHONPATH="tests/support")
    sys.stdout.write(f"{end}: {found.splitlines()[-1]}\n")


def main() -> None:
    uv = shutil.which("uv") or sys.exit("uv is not installed: pip install uv")
    shutil.rmtree(WORK, ignore_errors=True)
    run(uv, "build", "--quiet", "--python", sys.executable, "--out-dir", WORK / "dist")  # the wheel from the sdist
    (wheel,) = (WORK / "dist").glob("*.whl")
    for end in sys.argv[1:] or RESOLUTIONS:
        test(end, uv, wheel)


if __name__ == "__main__":
    main()
