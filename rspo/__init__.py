"""RSPO: a thin trainer for Reward-Swap Policy Optimization (arXiv 2607.04713)."""
