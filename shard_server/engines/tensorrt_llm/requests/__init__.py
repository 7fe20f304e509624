"""One request inside TensorRT-LLM.

request_fields.py   checks, cache salt, guide and adapter of an EngineRequest
sampling_params.py  its sampling as TensorRT-LLM's SamplingParams
scheduling.py       its urgency, the retention of its blocks, its rank and its place in a trace
lora.py             LoRA adapters by name
adapter_files.py    their files, compared with the model's before the library loads them
request_stream.py   the new part of each iteration of its output
"""
