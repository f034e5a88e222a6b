"""What Algorithm 1 is made of: episodes, rewards, advantages, replay, updates, what is measured."""
