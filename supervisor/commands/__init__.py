"""The commands of `dflashctl`, one module for each group; `supervisor.cli` assembles them.

They talk to the daemon only through `supervisor.client`. Modules here import the standard library and typer
at the top and everything slow inside the function that needs it, so that a command starts at once; a test
holds that.
"""
