"""Formats of other programs, a folder for each, and what several of them share: archives and pickles."""
