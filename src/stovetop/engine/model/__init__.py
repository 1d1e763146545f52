"""The base model: read from its files, proven to be what its config says, then frozen and shared."""
