"""What the training verbs do to an adapter: passes over data, losses, the optimizer."""
