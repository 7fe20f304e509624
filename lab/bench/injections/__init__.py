"""One attempt at a classifier of prompt injections, for `kvloom-lab bench injections`.

command.py     the command: trains, measures in and out of distribution and under attack, and prints the tables
corpora.py     labelled texts of others, from wheels of the package index
classifier.py  logistic regression on embeddings, its threshold, and a greedy attack on it
"""
