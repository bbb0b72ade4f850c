"""The command line, one module for each command. A command decides what to call and how to print the result, nothing
else."""
