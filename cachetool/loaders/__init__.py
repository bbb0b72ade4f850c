"""Loaders: the modules that training scripts import, one for each framework.

``loaders.torch`` and ``loaders.tensorflow`` import their framework; ``loaders.numpy`` needs none. Importing this
package imports no framework.

::

    Loader (base) -- feed: Processes, or InProcess         the training process
        ring, slot    shared memory                        ------------------------------
        feeder        order -> gather -> slot              feeders
        leader        snapshots and leases                 the first of them
"""
