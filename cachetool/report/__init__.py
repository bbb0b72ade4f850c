"""A picture of a cache: one page of HTML that needs nothing else, made by ``cachetool stats --html``."""
