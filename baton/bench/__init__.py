"""`baton bench`: load on a running service, and what its clients see of it.

`options.py` what can be asked for · `asks.py` prompts and lengths · `load.py` closed and open loops · `system.py` the
service and its CPU time · `rows.py` figures · `scenario.py` what a scenario is made of · `contention.py` and
`comparisons.py` the scenarios · `report.py` and `plot.py` how results are shown · `command.py` the command.
Everything is measured at the client, over real sockets. One run says little on a shared machine: repeat, alternate.
"""
