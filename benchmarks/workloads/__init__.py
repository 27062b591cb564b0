"""What is measured: the same work, done by each contestant in its own words."""
