"""What Weft adds to vLLM's HTTP server."""
