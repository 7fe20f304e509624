"""The limits of keys, tenants and organisations: who may begin a request now, and how far its answer may go.

Rates and slots belong to all routers together, and so do budgets: a router spends what it has leased of them. Nothing
here waits for a lease; a request that needs one is held by `admission/requests_awaiting_lease.py` until it arrives.

verdict.py            what a limit says to a request
rate_lease.py         this router's part of a limit per minute
slot_lease.py         this router's part of the requests that may run at the same time
budget_lease.py       this router's part of a hard budget
demand.py             how much of a limit is used in a second, of late
answer_cost.py        what an answer uses of a budget, as a function of its length
accounts.py           the leases of the keys, tenants and organisations that are in use
limit_plan.py         the limits of one key, flat
limit_plans.py        the plans of the keys in use
request_charge.py     what one request has taken from its accounts
limit_refusals.py     the errors of requests above a limit
lease_watch.py        which leases have to be asked for, renewed or given back
short_path.py         the usual case: everything that a request needs has been leased
dry_run_budgets.py    budgets in shadow mode, which decide when `control` has answered
side_calls.py         limits of calls that compute no answer
limiter.py            Limiter, the entry point: admits, refuses, holds and settles
"""
