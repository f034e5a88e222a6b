"""What is trained: a policy, its copies and optimisers, a critic, a reward model."""
