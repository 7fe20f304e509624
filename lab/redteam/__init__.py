"""`kvloom-lab redteam`: attacks on the safety policy, and harmless texts that look like them, through every API of a
fabric in one process (docs/notes/reliability/red-team.md).

command.py      the command
rules.py        the policy that is attacked, and the texts that it forbids
mutators.py     the ways in which an attacker writes a forbidden text
look_alikes.py  harmless texts that look like forbidden ones
places.py       where in a request, and in which part of an answer, a text stands
cases.py        draws attacks and harmless texts from seeds
echo_engine.py  an engine that answers with the text that it is told to write
fabric.py       an edge, a router, a safety service and a shard in one process
campaign.py     sends the cases, and judges what their clients see
latency.py      the time that each layer of the policy takes
report.py       the tables
outages.py      thousands of answers at once while the safety service fails
clients.py      the clients of these answers
faults.py       a safety service that is killed, hangs and sends garbage
processes.py    the processes of clients and safety service, and what they share
"""
