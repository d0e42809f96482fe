"""LangChain and LangGraph: a chat model on a Weft engine, and the callback handler that carries the program to it.

The handler sees the tree of runs, so it can say which program a call belongs to, which thread and which parents. How it
reaches the model on each of LangChain's paths is explained in docs/design.md.
"""

from __future__ import annotations

from weft.integrations.langchain.chat_model import ChatWeft
from weft.integrations.langchain.handler import ProgramCallbackHandler

__all__ = ["ChatWeft", "ProgramCallbackHandler"]
