"""What is of language policies alone in a run."""
