"""Adapters as files: PEFT's format in and out, and the merged export."""
