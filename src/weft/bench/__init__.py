"""`weft bench`: a trace replayed on real vLLM under several baseline schedulers (docs/explanation/benchmark-method.md).

`baselines` lists the schedulers. `load` and `rounds` make the programs of a round. `stepper` and `meter` run
a vLLM engine step by step, `replay` serves the programs on it, `engines` does so for all baselines and rounds.
`measures` computes figures, `sim_comparison` compares them with the simulator, `page` writes them.
"""
