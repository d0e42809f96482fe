"""How much work programs need, learned from those that have ended, and the ranks that follow from it."""
