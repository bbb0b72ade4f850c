"""Samples read from stores: a source is listed once, its units are numbered, and many requests run at the same time."""
