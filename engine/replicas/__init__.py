"""Replicas: vLLM engines that are launched, watched, restarted and routed to, on this host or in Ray."""
