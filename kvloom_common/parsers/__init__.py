"""Output parsers: a model's text, as it arrives, becomes typed events (text, reasoning, tool calls).

Pure: text in, events out. However the text is split into deltas, the events are the same
(docs/reference/tool-calls.md).

events.py          `TextDelta`, `ReasoningDelta`, `ToolCallStart`, `ToolCallArguments`, `ToolCallEnd`
spec.py            `OutputParser`, `ParserSpec`, `ToolSchema`
output_parser.py   `make_parser`: a parser by the names of its families
registry.py        the families by name: those of this package, and plugins
sniff.py           which families a model needs, from its chat template
core/              what the families share
tools/             the families of tool calls
reasoning/         the families of reasoning
"""
