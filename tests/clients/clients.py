"""The clients that are checked, and what is checked of each."""

from __future__ import annotations

import dataclasses
from typing import Final

CHECKS: Final = (
    "plain",
    "streaming",
    "forced tool",
    "required tool",
    "tool round trip",
    "structured output",
    "responses",
    "errors",
    "abort",
)
"""A test's name begins with its check's. A client that does not offer something has no test of it."""


@dataclasses.dataclass(frozen=True)
class Client:
    name: str
    file: str
    """The file with its checks, in `python/` or `node/`."""
    packages: tuple[str, ...]
    """The packages whose versions are shown, as their registry names them."""
    environment: str = "node"
    """For Python: the requirements file of its virtual environment, without its ending."""


CLIENTS: Final = (
    Client("openai (Python)", "check_openai.py", ("openai",), "current"),
    Client("anthropic (Python)", "check_anthropic.py", ("anthropic",), "current"),
    Client("LangChain", "check_langchain.py", ("langchain-openai", "openai"), "current"),
    Client("Pydantic AI", "check_pydantic_ai.py", ("pydantic-ai-slim",), "current"),
    Client("smolagents", "check_smolagents.py", ("smolagents",), "current"),
    Client("LiteLLM", "check_litellm.py", ("litellm",), "current"),
    Client("anthropic 1 (Python)", "check_anthropic.py", ("anthropic",), "openai2"),
    Client("openai 2 (Python)", "check_openai.py", ("openai",), "openai2"),
    Client("Instructor", "check_instructor.py", ("instructor", "openai"), "openai2"),
    Client("LlamaIndex", "check_llama_index.py", ("llama-index-llms-openai-like", "openai"), "openai2"),
    Client("openai (Node)", "openai.test.mjs", ("openai",)),
    Client("anthropic (Node)", "anthropic.test.mjs", ("@anthropic-ai/sdk",)),
    Client(
        "Vercel AI SDK", "ai-sdk.test.mjs", ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic")
    ),
)
