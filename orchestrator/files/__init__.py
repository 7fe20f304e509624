"""The contents of files, in a directory or in a store of the S3 protocol.

contents.py  writes, reads and deletes them
"""
