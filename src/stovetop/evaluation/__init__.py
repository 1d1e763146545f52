"""Measuring a model on a set of examples: one row an example, and what the rows come to with their standard errors."""
