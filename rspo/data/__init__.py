"""What is passed around: trajectories, rows of tokens, and texts as token ids and back."""
