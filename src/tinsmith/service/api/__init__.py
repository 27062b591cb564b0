"""HTTP requests into entries of the ledger, settled commands into replies."""
