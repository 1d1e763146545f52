"""Learning from a teacher: a larger or a better model. What stands in each file, its first lines say."""
