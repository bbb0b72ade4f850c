"""Samples read out of remote stores: listed once, numbered by units, fetched with many requests in flight."""
