"""Additions to vLLM's HTTP server: the middleware `CheckIds`, and the identity of requests."""
