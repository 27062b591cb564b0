"""PyTorch in this process: many adapters trained in one pass, and samples beside them."""
