"""LoRA adapters of the torch engine.

peft.py             reads PEFT's directory format, and refuses what cannot be computed
reader.py           reads and loads adapters for the engine's AdapterHost
torch_adapter.py    the products of adapters with torch's operators; for compiled kernels see kernels/adapter_rows.py
"""
