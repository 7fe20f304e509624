"""The record of placement decisions: kept in memory for `Explain`, and written to the decision log's file.

records.py      the lines of the file, which docs/how-to/routing-decisions.md describes
packing.py      how placements are kept in memory
log.py          joins the placements and the end of each request
journal.py      makes the file's lines
file.py         the file itself, written by a thread and rotated
responses.py    the responses of `RouterService.Plan` and `Explain`
"""
