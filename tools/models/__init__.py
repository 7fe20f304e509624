"""Finds, registers and prepares models.

resolve.py   resolves `--model NAME|PATH` to a directory
registry.py  the registry of models on this machine
prepare.py   the process that converts a model
comparison.py  `kvloom models compare`: the likelihood gap of two models, and what it costs to measure
"""
