"""What runs next, and with whom: from commands in the ledger to settled ones."""
