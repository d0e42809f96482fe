"""LangChain and LangGraph: a chat model on a Weft engine, and the callback handler that carries the program to it.

The handler sees the tree of runs, so it knows the program, the thread and the parents of each call.
docs/explanation/identity.md explains how the handler reaches the model on each of LangChain's paths.
"""

# ruff: noqa: E402
from weft.integrations import require_packages

require_packages("weft.integrations.langchain", "langchain-core")

from weft.integrations.langchain.chat_model import ChatWeft
from weft.integrations.langchain.handler import ProgramCallbackHandler

__all__ = ["ChatWeft", "ProgramCallbackHandler"]
