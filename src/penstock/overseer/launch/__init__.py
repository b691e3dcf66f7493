"""Starting the components of a run, and what surrounds them."""
