"""A file per family of tool calls. Each says what the model writes, and where that is documented.

hermes.py        Hermes 2 and 3, Qwen 2.5 and 3, Granite 4
llama3_json.py   Llama 3.1 to 3.3
pythonic.py      Llama 4, Llama 3.2 (small), and other models that write calls as Python
mistral.py       Mistral, both forms
deepseek.py      DeepSeek V3 and R1, and V3.1
qwen3_coder.py   Qwen3-Coder's XML
kimi_k2.py       Kimi K2
glm45.py         GLM 4.5 to 4.7
harmony.py       gpt-oss: channels of reasoning, text and calls
granite.py       Granite 3
phi4.py          Phi-4-mini
plain_json.py    JSON without markers, which forced calls are, too
"""
