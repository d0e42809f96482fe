"""Weft's own models: the embedded model, and a tiny random model for tests and benchmarks."""
