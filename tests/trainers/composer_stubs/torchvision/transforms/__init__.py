"""Nothing: composer imports the module."""
