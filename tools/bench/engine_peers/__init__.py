"""Other engines for `kvloom bench engine --vs`: each in a process and a virtual environment of its own."""
