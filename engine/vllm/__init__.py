"""One vLLM engine in this process: its start, its chat endpoint, and what its scheduler reports."""
