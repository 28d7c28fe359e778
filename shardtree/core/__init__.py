"""The core: leaves, geometry, tree maps, layouts, plans and encodings, which describe and have no effect."""
