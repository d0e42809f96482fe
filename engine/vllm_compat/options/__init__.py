"""The options and request fields that vLLM knows, by version."""
