"""``cachetool bench``: how fast this machine can feed a training loop, and what holds it back.

A front door of its own: it looks through the loaders as a training script does, in a process of its own
(``python -m cachetool.bench``), which the command starts and whose lines it shows.

::

    samples      up to 128 MB of the user's own, out of a cache or of files; made up without any
    ceilings     what the disk and the memory give
    rates        each format through the loader: warm, cold, beside a busy trainer; torch and TensorFlow where installed
    advice       one sentence, from these numbers alone
"""
