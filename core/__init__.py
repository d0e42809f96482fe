"""Programs, the process table, and the rules of scheduling and routing, without vLLM or any agent framework."""
