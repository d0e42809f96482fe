"""Policies of the papers that the default does not use."""
