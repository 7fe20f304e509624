"""Judges a run: the answers, the failures, the usage records and the memory, and the report about them.

verdicts.py      compares a received answer with the expected one
explanations.py  decides whether faults explain a failure
record.py        what is kept of every answer
usage_log.py     reads the usage records from the routers' logs
stored.py        whether stored responses are found at the end
absences.py      how requests for a model were answered while it was away
metering.py      compares the usage records with what was delivered
memory.py        the resident memory of the processes
attack_report.py  what users noticed of an attack, and what it left in memory
report.py        the figures of a run
report_text.py   the figures as text and Markdown
"""
