"""Learners by name: built in, offered by a package, in a user's file, or driven by hand."""
