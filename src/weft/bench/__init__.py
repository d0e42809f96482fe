"""`weft bench`: a trace replayed on real vLLM, baseline schedulers side by side (docs/benchmarks.md).

`load` makes what arrives, `stepper` and `meter` an engine that is stepped by hand, `replay` plays programs on it,
`session` all baselines in turns, `measures` and `agreement` say what came of it, `report` and `plots` show it.
"""
