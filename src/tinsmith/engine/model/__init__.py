"""Tensors only: the network, its adapters, losses, optimizers and sampling, in plain torch."""
