"""The host process: its exit code after Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

_SCRIPT = """
import atexit
from weft.engine.processes.host import keep_exit_code_of_ctrl_c
keep_exit_code_of_ctrl_c()
keep_exit_code_of_ctrl_c()
atexit.register(lambda: eval("1"))  # as packages of vLLM do; it makes Python forget why the script ended
print("said")
try:
    {}
except ValueError:
    pass
"""


@pytest.mark.parametrize(
    ("ending", "exit_code"),
    [("raise KeyboardInterrupt", -signal.SIGINT), ("raise KeyError", 1), ("raise ValueError", 0)],
)
def test_a_script_that_ctrl_c_ends_has_its_exit_code(ending: str, exit_code: int) -> None:
    """A shell shows the end by SIGINT as 130. Python would exit with 1 after code that vLLM's packages run at exit."""
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT.format(ending)], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout) == (exit_code, "said\n")
