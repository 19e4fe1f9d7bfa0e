"""The privacy mechanisms, pure: counters, noise, and every role's half of each workflow."""
