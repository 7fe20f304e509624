"""Runs the model on a GPU.

runner.py           DeviceRunner: the batch of a step on one device
decode_steps.py     decode steps of fixed sizes, recorded as CUDA graphs
attention.py        attention over the KV cache on the device
segment_kernels.py  Triton kernels for attention in segments of keys, of single rows
prompt_kernels.py   the Triton kernel for attention of all prompts of a step
"""
