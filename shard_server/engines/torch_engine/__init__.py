"""The embedded engine: Llama-family models and encoders computed in this process, on CPUs or on one GPU.

engine.py        TorchEngine: the Engine protocol over a compute thread
step_loop.py     one iteration: schedule, run, draw, report; on a device the next one begins before this one ends
launched_step.py  the rows of a step, and the tokens that are drawn from them
scheduler.py     which sequences a step computes, and how many of their tokens
drafter.py       which sequences of a step get drafts for speculation
sequence.py      one request's tokens, KV blocks and progress
block_pool.py    reference-counted KV blocks with a prefix cache
pooling.py       the embedding of a prompt, from the hidden states of its tokens
speed.py         moving averages of prefill and decode speed
warm_up.py       the steps before the first request
model_runner.py  runs a step's batch on the CPU
arithmetic.py    what computes on this CPU: number formats and kernels
grouped_weight.py  weights of 4 or 8 bits with a scale for every 32
weight_form.py   the forms that weights can have in memory
core_share.py    how many threads an engine computes with beside others
lora/            LoRA adapters
forward.py       a forward pass with torch's operators or compiled kernels
model.py         the decoder: weights and layers
config.py        config.json, checked
config_values.py  reads JSON files and checks numbers
rope.py          rotary position embedding
kv_cache.py      the memory of the KV blocks
memory.py        how much memory is available and needed
uploads.py       sends data to a device without waiting for it
sampling/        draws tokens: sampling, guides and speculation
checkpoint/      reads model files and converts GGUF files
encoder/         encoders, which only give embeddings
kernels/         compiled CPU kernels
operators/       what torch's operators compute, where compiled kernels cannot
device/          runs the model on a GPU
"""
