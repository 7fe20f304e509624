"""`kvloom-lab chaos`: a live fabric whose processes are killed, hung and cut off while users check every word.

command.py  the command and its progress line
run.py      one run: the fabric, its users, the faults and the report
users.py    simulated users
region_loss.py  two cells, one of which is lost
clients/    their questions, the correct answers, and the clients that they use
fabric/     the processes under test and the faults
tenants/    keys, limits and budgets of the users, and what must hold of them
attackers/  a process that attacks the fabric
checking/   judges answers, failures, usage records and memory
"""
