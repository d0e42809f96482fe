"""All code that uses vLLM: the engines, their replicas, the scheduler plugin, KV swapping and the embedded model."""
