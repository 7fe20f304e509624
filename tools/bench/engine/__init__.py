"""`kvloom bench engine`: the speed of the embedded engine.

command.py            the command and its flags
report.py             runs the measurements of one engine, and renders the report
throughput.py         prefill and decoding, in a bounded time per figure
roofline.py           `--roofline`: the machine's limits, and the share of them that the engine reaches
roofline_kernels.py   compiled loops by which they are measured
model_costs.py        bytes and operations of a decoding step and a prompt, from a model's config
device.py             `--shape`: large shapes on one device
"""
