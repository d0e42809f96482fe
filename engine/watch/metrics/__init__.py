"""What monitoring systems get of an engine: metrics for Prometheus, spans for OpenTelemetry."""
