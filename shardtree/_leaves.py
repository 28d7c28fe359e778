"""What core and shell find by name, once they need it: the only place from which they reach what hangs from them.

A save or load of our own format needs none of these; whoever does imports it then. Each name is a module of the
package and, after a colon, what of it is meant.
"""

from __future__ import annotations

LEAVES: dict[str, str] = {
    "differing_replicas": "checkpoint._replicas:differing_replicas",
    "drop_objects": "objects._rules:drop_objects",
    "formats": "_formats:ROWS",
    "html_of": "display:html_of",
    "not_a_checkpoint": "checkpoint._no_checkpoint:not_a_checkpoint",
    "read_together": "checkpoint.loading._exchange:read_together",
    "storage_behind": "stores._url:storage_behind",
    "through_trace": "lenses:through_trace",
}
