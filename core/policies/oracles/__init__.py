"""Policies that know the future. They run in simulation only, as bounds on what a real policy can reach."""
