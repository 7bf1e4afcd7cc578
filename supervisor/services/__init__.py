"""Use cases in one short transaction each: write intent and event, then hint the loop."""
