"""Several cells (docs/operate/regions.md): where a request begins soonest.

policy.py        the order in which cells are asked. Pure
prefix_homes.py  the cells that have computed the beginnings of prompts
other_cells.py   what an edge knows of the cells, and asks of their routers every second
"""
