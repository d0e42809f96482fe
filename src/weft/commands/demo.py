"""`weft demo`: the ReAct example on a real engine."""

from __future__ import annotations

from typing import Annotated

import typer

from weft.commands.choices import one_of
from weft.commands.model import fetch_model
from weft.core.errors import WeftError
from weft.core.errors.install import pip_install
from weft.core.policies import DEFAULT_POLICY, POLICIES
from weft.engine.models.embedded import is_embedded_model_ready
from weft.engine.vllm_compat.version import check_vllm


def demo(
    model: Annotated[
        str | None,
        typer.Option(help="A folder in Hugging Face format, or a hub name (default: the embedded SmolLM2)."),
    ] = None,
    policy: Annotated[str, one_of(POLICIES, help="The policy to compare with fcfs, vLLM's own order.")] = (
        DEFAULT_POLICY
    ),
    programs: Annotated[
        int | None, typer.Option(min=1, help="How many agents run at once (default: one for each task of the demo).")
    ] = None,
) -> None:
    """Run the ReAct example on a real engine in this process: under fcfs, then under a policy."""
    try:
        from weft.examples.react_langchain import run_demo
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in {"langchain", "langchain_core", "langgraph"}:
            raise
        command = pip_install("langchain", "langchain-core", "langgraph")
        raise WeftError(f"the demo needs LangChain: {command}") from error
    check_vllm()
    if model is None and not is_embedded_model_ready():
        fetch_model()
    raise typer.Exit(run_demo(model, policy, programs))
