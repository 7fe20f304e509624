"""Several cells (docs/operate/regions.md): where a request begins soonest.

policy.py        the order in which cells are asked. Pure
prefix_homes.py  the cells that have computed the beginnings of prompts
known_cells.py   what an edge knows of the cells, and which of them a request may have. Pure
other_cells.py   asks the routers of all cells every second
"""
