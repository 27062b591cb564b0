"""Many replicas as one engine: placement, moves, partial loss."""
