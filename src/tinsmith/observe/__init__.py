"""What is seen of the work: log fields, metrics, spans, bars. Knows of nothing else."""
