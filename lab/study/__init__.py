"""The study of placement policies in docs/routing.md.

command.py  the command that runs the missing simulations and writes the tables
plan.py     the simulations behind each table
results.py  the reports of finished simulations, kept in a file
page.py     renders the tables
"""
