"""The shell: what saving and loading our own format does, from the ranks that take part to the files."""
