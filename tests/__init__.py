import os

os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "false")  # what tests compile is of no use to anybody later
