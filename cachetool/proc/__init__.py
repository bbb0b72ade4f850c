"""Processes and disks: starts children, talks to them, writes durably."""
