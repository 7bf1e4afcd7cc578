"""Threads, queues and messages between target and drafter workers."""
