"""Searching in files: how they become chunks with vectors, and how chunks are found again.

extraction.py  the text of a file, in a process of its own where it must be parsed
file_texts.py  texts of files that requests give to a model, kept for a while
chunking.py    cuts texts into chunks
embedding.py   vectors of texts, by an encoder of the fabric
indexing.py    works at one file of a vector store, to its end
filters.py     which files a search may find, by their attributes. Pure
words.py       the words of texts, as numbers
fusion.py      one ranking from several. Pure
reranking.py   ranks passages again, by a model of the fabric
index.py       the chunks of one vector store in memory
searcher.py    finds chunks by an index that is up to date
"""
