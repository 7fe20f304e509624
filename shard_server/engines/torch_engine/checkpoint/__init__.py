"""Reads model files.

weights.py          safetensors files, checked against config.json
sentence_config.py  how the model's embeddings are meant to be made
converted_model.py  the cache of converted GGUF files, and the built-in model
gguf_conversion.py  converts a GGUF file into a model directory
gguf_config.py      its metadata as config.json
gguf_tokenizer.py   its vocabulary as tokenizer.json
gguf_weights.py     its tensors as bf16 safetensors
gguf_blocks.py      its quantised blocks as grouped weights
packed_files.py     the files in which a converted model keeps these
"""
