"""Additions to vLLM's HTTP server."""
