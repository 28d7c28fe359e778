"""Saving: a tree is taken apart, gets a folder, is written by all ranks and committed, or takes an old one's place."""

from ._save import save as save
