"""Models that Weft brings along: the embedded one, and a tiny random one for tests and benchmarks."""
