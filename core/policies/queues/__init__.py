"""Queues of waiting calls, the bounds between queues, anti-starvation, and counts of each queue."""
