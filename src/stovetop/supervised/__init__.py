"""Supervised learning: chats to data (`data`), and the loss on held-out data (`nll`)."""
