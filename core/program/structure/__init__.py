"""How a program's calls depend on each other, inferred from runs, code and texts."""
