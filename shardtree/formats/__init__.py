"""Formats of other programs, a folder for each, and their shared parts: archives and pickles."""
