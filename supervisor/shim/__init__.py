"""Runs inside the node, stdlib only, Python 3.9 syntax; sent there as one zipapp."""
