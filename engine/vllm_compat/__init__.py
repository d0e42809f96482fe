"""The one door to vLLM: its version, and the names and members of it that Weft uses."""
