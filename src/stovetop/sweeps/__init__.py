"""Runs of one recipe that differ in some fields of their configs: which there are, several of them at once in one
process, and what came of them.

    SWEEP/sweep.json                      what was asked for
    SWEEP/learning_rate=1e-4,seed=0/      a run like any other, named by what is its own
    SWEEP/sweep.png                       the metric over each field
    SWEEP/report.html                     the table, the plot, and the curves of the best runs

points    which values the runs have: all combinations, or some drawn at random
running   one after the other, or side by side on one copy of the base model
results   the table, best first, and the plot
"""
