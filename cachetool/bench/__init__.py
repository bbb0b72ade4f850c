"""``cachetool bench``: how fast this machine can feed a training loop, and what limits it.

The command starts a process of its own, which uses the loaders as a training script does, and shows its messages.

::

    measure      the task of that process, of what follows
    samples      up to 128 MB of the user's own, out of a cache or of files; made up without any
    ceilings     what the disk and the memory give
    rates        each format through the loader: warm, cold, beside a busy trainer; torch and TensorFlow where installed
    advice       one sentence, from these numbers alone
"""
