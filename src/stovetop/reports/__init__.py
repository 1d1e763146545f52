"""What runs have come to, for people and for programs: how far each is (`standing`), the list of them (`listing`), and
what one has done, as a page, as Markdown and as JSON (`contents` and what is made of it). All of it is read from the
files of the runs. Nothing here writes into a run but the page, and nothing is needed to train.
"""
