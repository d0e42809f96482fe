"""What a benchmark leaves: records, measures, pictures and a page."""
