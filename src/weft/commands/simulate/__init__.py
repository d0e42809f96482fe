"""The commands that simulate: `weft sim`, `weft advise` and `weft profile`."""
