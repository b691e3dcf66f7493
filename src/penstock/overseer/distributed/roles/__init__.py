"""The components of a distributed run: each wires plain classes of the other packages inside its own process."""
