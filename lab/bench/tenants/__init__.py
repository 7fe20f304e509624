"""`kvloom-lab bench tenants`: what keys, limits, metering and prices cost a request.

command.py       the command and its table
variants.py      the fabrics and the keys that are compared
router_path.py   the router's path alone, repeated in one process
paired.py        differences of figures that were measured alternately, with their confidence
"""
