"""The laboratory, `kvloom-lab`: how kvloom is tested under faults, and its parts are measured and compared.

It belongs to a checkout of the repository: no wheel has it, and nothing that is shipped imports it.

commands.py   the command
dst/          `kvloom-lab dst`: deterministic simulation tests of the router core
chaos/        `kvloom-lab chaos`: a live fabric under faults
redteam/      `kvloom-lab redteam`: attacks on the safety policy, through every API
bench/        `kvloom-lab bench`: what parts and policies cost and bring, also beside others' gateways and engines
traces/       `kvloom-lab trace`: the trace of one request
flags.py      the flags of commands, with a line for each
free_ports.py  ports for processes that start a moment later
process_counters.py  CPU time, context switches and memory of processes
train_adapter.py  trains a small LoRA adapter, for demonstrations and tests
shallow_model.py  the first layers of a model, for tests and measurements
damaged_model.py  a copy of a model with one damaged layer, to see what finds it
pages.py      tables in Markdown, and their places in documentation pages
study/        `kvloom-lab bench routing`: the tables of placement policies in the docs
"""
