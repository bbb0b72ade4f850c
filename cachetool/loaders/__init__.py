"""Front doors for training scripts.

``loaders.torch`` and ``loaders.tensorflow`` import their framework; importing this package imports none.
"""
