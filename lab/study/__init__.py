"""The study of placement policies in docs/concepts/routing.md.

command.py  the command that runs the missing simulations and writes the tables
plan.py     the simulations behind each table
results.py  the reports of finished simulations, kept in a file
page.py     renders the tables

regimes_command.py  the command that compares policies and versions of the code where memory and decoding decide
regimes.py          the synthetic workloads for it
pairs.py            comparisons of runs that have the same draws
"""
