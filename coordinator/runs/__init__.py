"""Runs in progress: who drives each, and how a batch goes from deposit to result."""
