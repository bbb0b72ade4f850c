"""An empty module that composer imports."""
