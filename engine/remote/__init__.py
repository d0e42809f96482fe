"""An engine in another process: `weft.connect` makes one that sends its calls to a `weft serve`."""
