"""The start of a run, and what it leaves in its folder."""
