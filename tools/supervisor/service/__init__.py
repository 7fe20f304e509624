"""SupervisorService: what commands ask of a running `kvloom up`, here and on other machines.

server.py          the service
client.py          its client
state_messages.py  the state as a message
"""
