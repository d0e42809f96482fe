"""How much work programs need: learned from those that have ended, and what follows for ranks."""
