"""`kvloom whatif`: a router's decision file under other limits, prices, policy or fleet, tenant by tenant.

command.py     the command
changes.py     the files with limits and prices
prediction.py  the replay, and the figures of each tenant as recorded and as predicted
"""
