"""Learning from comparisons: which of two answers is better. What stands in each file, its first lines say."""
