"""Several front doors: HTTP processes that may die, and the one process behind them that knows the programs."""
