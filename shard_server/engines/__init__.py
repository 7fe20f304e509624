"""The engines that a shard can serve, behind one protocol.

base.py          the Engine protocol: start here to add an engine
create.py        creates the engine that the configuration names, kvloom's own or that of another package
engine_kinds.py  lists kvloom's own engines, and what each needs and can share
built_in.py      makes kvloom's own engines
request_check.py  refuses requests that no engine can run
queue_order.py   the order in which waiting sequences are admitted, shared by the engines
prefill_order.py  whose prefill goes next, of classes and tenants, shared by the engines
eviction_order.py  which cached block is evicted next, and whose share protects it, shared by the engines
adapters/        which LoRA adapters are registered, loaded and in use, shared by the engines
sim_engine.py    the simulated engine: a timing model and real block accounting, without weights
sim_sequence.py  one sequence of the simulated engine
sim_blocks.py    the simulated engine's KV blocks, prefix cache and LRU
sim_tokens.py    what it computes: text, stamps, embeddings and adapters, pure
torch_engine/    the engine that computes in this process, on CPUs or one GPU
tensorrt_llm/    the engine over TensorRT-LLM
"""
