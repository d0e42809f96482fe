"""Everything that touches vLLM: the scheduler plugin, the engine and its chat endpoint, the embedded model."""
