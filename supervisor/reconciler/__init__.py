"""The level-triggered loop: fetch, lease, observe, decide, act, apply."""
