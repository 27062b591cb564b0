"""Names of log fields, metrics and spans, and what turns them into text. Knows of nothing else."""
