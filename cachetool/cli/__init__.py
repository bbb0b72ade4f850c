"""The command line: one page a command, each of them choosing what to call and how to print it, nothing else."""
