"""Batches: how they are checked, worked at and ended. What a line is answered, an edge says.

lines.py    the lines of an input file. Pure
progress.py  the rows of a batch and of its lines
batch.py    works at one batch, to its end
"""
