"""`weft serve`: vLLM's own HTTP application over an `AsyncMultiLLMEngine`."""
