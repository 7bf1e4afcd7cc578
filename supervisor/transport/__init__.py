"""How a node is reached: local, ssh, and pct stacked on ssh, behind one protocol."""
