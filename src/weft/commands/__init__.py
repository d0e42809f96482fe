"""The `weft` command line, one module a command."""
