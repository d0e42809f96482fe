"""Which replica a call goes to, which replicas there are, and how many calls are let in."""
