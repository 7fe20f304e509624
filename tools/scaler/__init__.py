"""`kvloom scaler`: how many shards each model needs, from what the routers know, for KEDA and Prometheus.

load.py      the load of a model's shards at one time, and how it is made of what routers say. Pure
policy.py    how many shards a load needs. Pure
watch.py     asks the routers again and again, and keeps a policy for each model
servicer.py  KEDA's external scaler
metrics.py   the metrics of this process
command.py   the command
"""
