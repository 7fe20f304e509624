"""Tenants, as every process knows them: who may use what, how much of it, and at which price. All of it is pure.

scopes.py         what a key may be used for, who may give it out, and which priority classes may be named
principal.py      who makes a request, and what it may be used for
limits.py         how much an account may use
prices.py         what a request costs
usage_record.py   what is known of a request once it has ended: the unit of metering
usage_stream.py   how records of usage go from routers to the control service
sliced_dict.py    a large dictionary that neither grows nor goes at once
table.py          the tenants, keys, limits and prices of a fabric, looked up without a database
"""
