"""Tests that follow the advice of messages: see :mod:`tests.advice.messages`."""
