"""The shell: saving and loading of our own format, from the exchange between ranks down to the files."""
