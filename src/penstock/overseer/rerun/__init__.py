"""Updates of a run made again from its files: whether they come out the same, otherwise, and what moved them."""
