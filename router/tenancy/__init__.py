"""Leases of shared limits: the router's shell around `router/core/tenancy`. Nothing here makes a request wait longer
than the core allows.

lease_script.py   the one script in Redis that leases rates and slots
rate_leases.py    asks Redis
budget_leases.py  asks the control service
shadow_log.py     logs what limits in shadow mode would have done
lease_client.py   sends what the core wants to the one that has it, and counts
"""
