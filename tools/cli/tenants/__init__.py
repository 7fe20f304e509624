"""The commands about tenants: `kvloom orgs|projects|users|keys|limits|prices`, over DirectoryService of control.

directory.py   finds the control service of a fabric, and asks it
units.py       times, durations, amounts and limits as people write them. Pure
tables.py      what is shown, as tables or as JSON
resources.py   what the commands of organisations, projects, users and keys have in common
orgs.py        organisations, and the audit
projects.py    projects
users.py       users and their roles
keys.py        keys
limits.py      limits of accounts, and tiers
prices.py      prices
"""
