"""Queues of waiting calls, the bounds between queues, and counts of each queue."""
