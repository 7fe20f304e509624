"""JSON Schemas as guides of generation: the part of the language that compilers of guides can follow.

simplify.py      rewrites a schema into that part; what cannot be followed is refused by name, or dropped
keywords.py      the keywords: which are followed, which are annotations, and the forms of older drafts
merging.py       one schema from several that hold for the same value
objects.py       the keywords of objects, which have only the properties that their schema names
references.py    finds what a reference names, within one schema
patterns.py      regular expressions of JSON Schema in the syntax of the compilers
bounded.py       bounds for what a model could write without end: numbers, fractions of times, values of any kind
schema_check.py  whether a value conforms to a schema
"""
