"""Saving: a tree is taken apart, written by all ranks to a folder, and committed, or replaces an old checkpoint."""

from ._save import save
