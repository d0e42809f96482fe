"""The `weft` command line: one module for each command."""
