"""What is of control policies alone in a run."""
