"""Jobs: work that one orchestrator at a time does, and that another one continues when it dies. What is done, batches/
and background/ say.

claims.py  who does which job
runner.py  finds jobs to do, and holds them
edges.py   sends requests to edges, on behalf of tenants
erasure.py  erases what is stored of a tenant or a user
"""
