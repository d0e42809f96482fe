"""Queues of waiting calls, the bounds between them, and what calls have had in them."""
