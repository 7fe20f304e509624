"""A file per family of reasoning. Reasoning comes first; what follows it is text, or the tool parser's.

marked.py       `MarkedReasoningParser`: reasoning between two markers
think.py        DeepSeek R1 and Qwen 3: think tags
granite.py      Granite 3: two sentences, or think and response tags
kimi.py         Kimi's triangles
mistral.py      Magistral's brackets
"""
