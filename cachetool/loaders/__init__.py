"""Front doors for training scripts.

``loaders.torch`` and ``loaders.tensorflow`` import their framework, ``loaders.numpy`` is the engine without any;
importing this package imports none of them.

::

    Loader (base) -- feed: Processes, or one Thread        the training process
        ring, slot    shared memory                        ------------------------------
        feeder        produce: order -> gather -> slot     feeders
        leader        turns: snapshots and leases          the first of them
"""
