"""Programs that run inside a node, one file each, stdlib only, Python 3.9 syntax.

`reconciler.scripts` sends a file's text to the node's interpreter on stdin and reads one JSON object back.
They are never imported by the daemon, and none of them leaves a process behind.
"""
