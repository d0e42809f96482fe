"""Steps of an engine: what they cost, and what they have room for."""
