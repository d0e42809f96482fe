"""`weft.testing`: what users need to test their own agent code."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import weft.core.testing
import weft.testing


def documented_test() -> Callable[[], None]:
    """The test function of the example in the docstring of `weft.testing`."""
    assert weft.testing.__doc__ is not None
    _, example = weft.testing.__doc__.split("::\n", maxsplit=1)
    names: dict[str, Any] = {}
    exec(textwrap.dedent(example), names)  # noqa: S102  the project's own docstring
    (test,) = [value for name, value in names.items() if name.startswith("test_")]
    return test  # type: ignore[no-any-return]


def test_the_documented_example_passes() -> None:
    """The example in the docstring of `weft.testing` is a test that passes."""
    documented_test()()


def test_the_names_are_those_of_core() -> None:
    """`weft.testing` exports the fakes that Weft's own tests use."""
    assert set(weft.core.testing.__all__) < set(weft.testing.__all__)
    for name in weft.core.testing.__all__:
        assert getattr(weft.testing, name) is getattr(weft.core.testing, name)


def test_tests_need_neither_vllm_nor_a_framework() -> None:
    """Importing `weft.testing` imports neither vLLM, torch nor a framework."""
    heavy = {"vllm", "torch", "langchain_core", "autogen_core", "openai"}
    code = f"import sys, weft.testing; print({heavy} & set(sys.modules))"
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (completed.stdout, completed.stderr) == ("set()\n", "")
