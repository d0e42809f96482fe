"""Programs, the process table and the scheduling policies: pure Python, no vLLM, torch, LangChain or AutoGen."""
