"""The gate: how many programs may hold KV at once, around any policy."""
