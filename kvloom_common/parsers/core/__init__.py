"""The families of parsers share these modules.

text_input.py      text that has arrived and is not consumed, and generators that wait for more of it
grammar_parser.py  `GrammarParser`: an output parser whose grammar is written as a generator
json_scanner.py    finds the end of a JSON value, piece by piece
json_call.py       calls whose arguments are JSON: streamed verbatim
python_call.py     calls written as Python: the arguments become JSON while they arrive
typed_value.py     bare values between markers, which become JSON by the tool's schema
json_text.py       JSON text from strings and literals
"""
