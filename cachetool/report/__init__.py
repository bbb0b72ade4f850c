"""The report of a cache: one page of HTML that needs no other file, made by ``cachetool stats --html``."""
