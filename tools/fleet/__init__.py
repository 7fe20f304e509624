"""A fleet as commands see it: the machines that share a Redis, and the processes that were started by themselves.

view.py     what is known of all machines, merged
members.py  asks the supervisors and the registry
control.py  finds the control service
logs.py     the logs of all machines in one order
"""
