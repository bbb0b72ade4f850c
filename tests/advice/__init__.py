"""What messages advise, followed: see :mod:`tests.advice.messages`."""
