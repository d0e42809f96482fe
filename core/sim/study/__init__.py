"""What is asked of simulations: rivals, advice, loads, and the profile of an engine."""
