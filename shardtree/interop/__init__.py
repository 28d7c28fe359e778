"""Other libraries' shards as ours and back: one module a library, imported by name when it's wanted.

No module here imports its library before it has to build the library's own objects.
"""
