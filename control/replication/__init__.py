"""The table that edges and routers follow.

entries.py    organisations, tenants, keys and prices of the database as entries of the table
versions.py   waits for the next version
follower.py   what one follower is sent: a snapshot in parts, and then changes
"""
