"""Meters what was used, and leases what may still be used.

accounts.py         whom a record is charged to, and what it adds to which sums; pure
account_limits.py   the hard budgets of accounts, from the directory
ledger.py           brings records into the database, each once
consumer.py         reads the stream of records from Redis
leases.py           hands out hard budgets to routers
report.py           usage by day, model and key
webhook.py          sends those notices
servicer.py         the RPCs about usage and budgets
work.py             what the control process runs for usage
metrics.py          how far the consumer has come
spend.py            what each tenant has spent in this month, as a metric
"""
