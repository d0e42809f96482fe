"""Programs, the process table, scheduling and routing rules: pure Python without vLLM, torch, LangChain or AutoGen."""
