"""The families of tool calls. Each says what the model writes, and where that is documented.

json_calls.py    JSON: Hermes, Qwen, Llama 3, Mistral, Granite, Phi-4-mini, and JSON without markers
pythonic.py      Llama 4, Llama 3.2 (small), and other models that write calls as Python
deepseek.py      DeepSeek V3 and R1, and V3.1
qwen3_coder.py   Qwen3-Coder's XML
kimi_k2.py       Kimi K2
glm45.py         GLM 4.5 to 4.7
harmony.py       gpt-oss: channels of reasoning, text and calls
"""
