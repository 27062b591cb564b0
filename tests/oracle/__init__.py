"""What other implementations make of the same schema, for tests to compare with."""
