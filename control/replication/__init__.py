"""The table that edges and routers follow.

entries.py    organisations, tenants, keys and prices of the database as entries of the table
changelog.py  which entries have changed since a version
versions.py   waits for the next version
follower.py   what one follower is sent: a snapshot in parts, and then changes
"""
