"""`baton profile`: what steps of workers take, of what their devices can do, and what bounds them.

`options.py` is what can be asked for, `load.py` starts a service and puts a fixed load on it, `workers.py` asks workers
(`Worker.Profile`), `figures.py` makes rows of their answers, `report.py` shows them, `command.py` joins all that.
"""
