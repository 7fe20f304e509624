"""A hostile neighbour: a process that attacks a running fabric over HTTP, gRPC and the Redis protocol.

mix.py         the attacks, and the loop that repeats all of them
targets.py     what is attacked, connections from the attackers' address, and the tally of answers
malformed.py   over HTTP: slow headers, smuggling, large bodies, guide bombs, floods of connections
greedy.py      over HTTP: streams that are not read, long answers with many choices, large answers
http2.py       HTTP/2 frames as the attackers write them
grpc.py        over gRPC: compressed and malformed messages, resets, guessed names
inside.py      noise at the ports inside the fabric, and commands at its registry without the password
neighbour.py   starts the process, and reads its tally
__main__.py    the process itself
"""
