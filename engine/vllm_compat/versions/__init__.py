"""Which versions of vLLM Weft runs on, and which members of vLLM it uses."""
