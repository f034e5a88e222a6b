"""Environments the trainer can be run on, and the contract they fulfil."""
