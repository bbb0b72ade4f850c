"""Processes and disks: starts child processes, talks to them, and writes files durably."""
